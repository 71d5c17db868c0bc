/* Operations on rows of numbers that take a decode step many small operations in torch.

   baton_rms_norm_1   RMS norm of `[rows, heads, size]`, with a weight for each head or one for all
   baton_rotate_1     rotary embedding of `[rows, heads, size]`, halves against each other

   `compiled_rows.py` calls them. Numbers are float32 or bfloat16. All is computed in float32, and rounded to bfloat16
   where torch's operations round: results are those of `rms_norm` and `rotate`, but for the order of a sum. `level`:
   as in `usable`. */

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

VERSIONS(baseline, )
VERSIONS(avx2, WITH_AVX2)
VERSIONS(avx512, WITH_AVX512)

void baton_rms_norm_1(void *out, const void *in, const void *weight, int64_t rows, int64_t heads, int64_t size,
                      int64_t row_stride, int64_t head_stride, int64_t weight_stride, float eps, int narrow, int wide,
                      int level)
{
    struct rows s = {out, in, rows, heads, size, row_stride, head_stride};
    static void (*const of_level[NUM_LEVELS])(const struct rows *, const void *, int64_t, float, int, int) = {
        norm_baseline, norm_avx2, norm_avx512};
    of_level[usable(level)](&s, weight, weight_stride, eps, narrow, wide);
}

void baton_rotate_1(void *out, const void *in, const void *cosines, const void *sines, int64_t rows, int64_t heads,
                    int64_t size, int64_t row_stride, int64_t head_stride, int narrow, int level)
{
    struct rows s = {out, in, rows, heads, size, row_stride, head_stride};
    static void (*const of_level[NUM_LEVELS])(const struct rows *, const void *, const void *, int) = {
        rotate_baseline, rotate_avx2, rotate_avx512};
    of_level[usable(level)](&s, cosines, sines, narrow);
}
