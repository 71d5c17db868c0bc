/* Operations on rows of numbers that take a decode step many small operations in torch.

   baton_rms_norm_1   RMS norm of `[rows, heads, size]`, with a weight for each head or one for all
   baton_rotate_1     rotary embedding of `[rows, heads, size]`, halves against each other

   `compiled_rows.py` calls them. Numbers are float32 or bfloat16. All is computed in float32, and rounded to bfloat16
   where torch's operations round: results are those of `rms_norm` and `rotate`, but for the order of a sum. `level` is
   the most that is used of the CPU's instructions: 0 baseline, 1 AVX2, 2 AVX-512. */

#include "numbers.h"

struct rows {
    void *out; /* Contiguous. */
    const void *in;
    int64_t rows, heads, size, row_stride, head_stride; /* In numbers; `size` is a multiple of LANES. */
};

INLINE void norm(const struct rows *s, const void *weight, int64_t weight_stride, float eps, int narrow, int wide)
{
    for (int64_t row = 0; row < s->rows; row++) {
        for (int64_t head = 0; head < s->heads; head++) {
            int64_t from = row * s->row_stride + head * s->head_stride, to = (row * s->heads + head) * s->size;
            floats squares = {0}, x, w;
            for (int64_t i = 0; i < s->size; i += LANES) {
                load(&x, s->in, from + i, narrow);
                squares += x * x;
            }
            float factor = 1.0f / __builtin_sqrtf(sum(&squares) / (float)s->size + eps);
            for (int64_t i = 0; i < s->size; i += LANES) {
                load(&x, s->in, from + i, narrow);
                load(&w, weight, head * weight_stride + i, narrow && !wide);
                x *= factor;
                if (narrow && !wide)
                    narrowed(&x);
                x *= w;
                store(s->out, to + i, &x, narrow);
            }
        }
    }
}

/* `cosines` and `sines`: `[rows, size]`. `size` is a multiple of 2 LANES. */
INLINE void rotate(const struct rows *s, const void *cosines, const void *sines, int narrow)
{
    int64_t half = s->size / 2;
    for (int64_t row = 0; row < s->rows; row++) {
        for (int64_t head = 0; head < s->heads; head++) {
            int64_t from = row * s->row_stride + head * s->head_stride, to = (row * s->heads + head) * s->size;
            for (int64_t i = 0; i < half; i += LANES) {
                floats real, imaginary, cosine, sine, turned;
                load(&real, s->in, from + i, narrow);
                load(&imaginary, s->in, from + half + i, narrow);
                for (int part = 0; part < 2; part++) {
                    int64_t at = part * half + i;
                    load(&cosine, cosines, row * s->size + at, narrow);
                    load(&sine, sines, row * s->size + at, narrow);
                    turned = (part ? imaginary : real) * cosine;
                    if (narrow)
                        narrowed(&turned);
                    turned += (part ? real : -imaginary) * sine;
                    store(s->out, to + at, &turned, narrow);
                }
            }
        }
    }
}

INLINE void norm_any(const struct rows *s, const void *weight, int64_t weight_stride, float eps, int narrow, int wide)
{
    if (!narrow)
        norm(s, weight, weight_stride, eps, 0, 0);
    else if (wide)
        norm(s, weight, weight_stride, eps, 1, 1);
    else
        norm(s, weight, weight_stride, eps, 1, 0);
}

INLINE void rotate_any(const struct rows *s, const void *cosines, const void *sines, int narrow)
{
    if (narrow)
        rotate(s, cosines, sines, 1);
    else
        rotate(s, cosines, sines, 0);
}

#define VERSIONS(suffix, attributes)                                                                                    \
    attributes static void norm_##suffix(const struct rows *s, const void *weight, int64_t stride, float eps,           \
                                         int narrow, int wide)                                                          \
    {                                                                                                                   \
        norm_any(s, weight, stride, eps, narrow, wide);                                                                 \
    }                                                                                                                   \
    attributes static void rotate_##suffix(const struct rows *s, const void *cosines, const void *sines, int narrow)    \
    {                                                                                                                   \
        rotate_any(s, cosines, sines, narrow);                                                                          \
    }

VERSIONS(plain, )
#if defined(__x86_64__)
VERSIONS(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))))
VERSIONS(avx2, __attribute__((target("avx2,fma"))))

static int usable(int level)
{
    __builtin_cpu_init();
    if (level >= 2 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return 2;
    return level >= 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#else
#define norm_avx512 norm_plain
#define norm_avx2 norm_plain
#define rotate_avx512 rotate_plain
#define rotate_avx2 rotate_plain

static int usable(int level)
{
    (void)level;
    return 0;
}
#endif

void baton_rms_norm_1(void *out, const void *in, const void *weight, int64_t rows, int64_t heads, int64_t size,
                      int64_t row_stride, int64_t head_stride, int64_t weight_stride, float eps, int narrow, int wide,
                      int level)
{
    struct rows s = {out, in, rows, heads, size, row_stride, head_stride};
    switch (usable(level)) {
    case 2:
        norm_avx512(&s, weight, weight_stride, eps, narrow, wide);
        break;
    case 1:
        norm_avx2(&s, weight, weight_stride, eps, narrow, wide);
        break;
    default:
        norm_plain(&s, weight, weight_stride, eps, narrow, wide);
    }
}

void baton_rotate_1(void *out, const void *in, const void *cosines, const void *sines, int64_t rows, int64_t heads,
                    int64_t size, int64_t row_stride, int64_t head_stride, int narrow, int level)
{
    struct rows s = {out, in, rows, heads, size, row_stride, head_stride};
    switch (usable(level)) {
    case 2:
        rotate_avx512(&s, cosines, sines, narrow);
        break;
    case 1:
        rotate_avx2(&s, cosines, sines, narrow);
        break;
    default:
        rotate_plain(&s, cosines, sines, narrow);
    }
}
