/* Operations on rows of numbers that take a decode step many small operations in torch.

   baton_rms_norm_2     RMS norm of `[rows, heads, size]`, with a weight for each head or one for all; before it a sum
   baton_rotate_1       rotary embedding of `[rows, heads, size]`, halves against each other
   baton_place_heads_1  norm and rotation of queries and keys, which then go to an array and, with the values, to the cache
   baton_gate_1         SiLU of the first half of each row, times the second half

   `compiled_rows.py` calls them. Numbers are float32 or bfloat16. All is computed in float32, and rounded to bfloat16
   where torch's operations round: results are those of torch, but for the order of a sum and the last bits of an
   exponential. `level` is the most that is used of the CPU's instructions: 0 baseline, 1 AVX2, 2 AVX-512. */

#include "decode.h"
#include "numbers.h"

struct rows {
    void *out; /* Contiguous. */
    const void *in;
    int64_t rows, heads, size, row_stride, head_stride; /* In numbers; `size` is a multiple of LANES. */
};

/* `added`: null, or contiguous numbers that are added to `in` first, in place. */
INLINE void norm(const struct rows *s, const void *added, const void *weight, int64_t weight_stride, float eps,
                 int narrow, int wide)
{
    for (int64_t row = 0; row < s->rows; row++) {
        for (int64_t head = 0; head < s->heads; head++) {
            int64_t from = row * s->row_stride + head * s->head_stride, to = (row * s->heads + head) * s->size;
            floats squares = {0}, x, w;
            for (int64_t i = 0; i < s->size; i += LANES) {
                load(&x, s->in, from + i, narrow);
                if (added) {
                    load(&w, added, to + i, narrow);
                    x += w;
                    if (narrow)
                        narrowed(&x);
                    store((void *)s->in, from + i, &x, narrow);
                }
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

INLINE void place_heads(const struct heads *s, int narrow, int wide)
{
    int64_t width = narrow ? 2 : 4, of_head = s->size * width, of_tables = s->rotated * width;
    int64_t of_weight = s->size * (narrow && !wide ? 2 : 4);
    int64_t num_turned = s->num_heads + s->num_kv_heads, num_all = num_turned + s->num_kv_heads;
    for (int64_t row = 0; row < s->rows; row++) {
        for (int64_t head = 0; head < num_all; head++) {
            const char *from = (const char *)s->packed + row * s->row_stride * width + head * of_head;
            char *to = (char *)s->queries + (row * s->num_heads + head) * of_head;
            if (head >= s->num_heads) {
                int64_t kv_head = (head - s->num_heads) % s->num_kv_heads;
                int64_t slot = s->slots[row * s->num_kv_heads + kv_head];
                to = (char *)s->cache + (2 * slot + (head >= num_turned)) * of_head;
            }
            struct rows one = {to, from, 1, 1, s->size, 0, 0};
            if (head >= num_turned || !s->weight)
                memcpy(to, from, (size_t)of_head);
            else
                norm(&one, 0, (const char *)s->weight + head * of_weight, 0, (float)s->eps, narrow, wide);
            if (head < num_turned && s->cosines) {
                struct rows turned = {to, to, 1, 1, s->rotated, 0, 0};
                rotate(&turned, (const char *)s->cosines + row * of_tables, (const char *)s->sines + row * of_tables,
                       narrow);
            }
        }
    }
}

/* `in`: `[rows, 2 size]`, with `row_stride`. */
INLINE void gate(const struct rows *s, int narrow)
{
    for (int64_t row = 0; row < s->rows; row++) {
        for (int64_t i = 0; i < s->size; i += LANES) {
            floats x, up, power;
            load(&x, s->in, row * s->row_stride + i, narrow);
            load(&up, s->in, row * s->row_stride + s->size + i, narrow);
            ints is_positive = x >= 0;
            words bits = (words)x | 0x80000000; /* -|x| */
            memcpy(&power, &bits, sizeof power);
            exponential(&power);
            floats one = (floats){0} + 1.0f, top;
            bits = ((words)one & (words)is_positive) | ((words)power & ~(words)is_positive);
            memcpy(&top, &bits, sizeof top);
            x = x * (top / (1.0f + power));
            if (narrow)
                narrowed(&x);
            x *= up;
            store(s->out, row * s->size + i, &x, narrow);
        }
    }
}

INLINE void norm_any(const struct rows *s, const void *added, const void *weight, int64_t weight_stride, float eps,
                     int narrow, int wide)
{
    if (!narrow)
        norm(s, added, weight, weight_stride, eps, 0, 0);
    else if (wide)
        norm(s, added, weight, weight_stride, eps, 1, 1);
    else
        norm(s, added, weight, weight_stride, eps, 1, 0);
}

INLINE void rotate_any(const struct rows *s, const void *cosines, const void *sines, int narrow)
{
    if (narrow)
        rotate(s, cosines, sines, 1);
    else
        rotate(s, cosines, sines, 0);
}

INLINE void place_any(const struct heads *s)
{
    if (!s->is_bfloat16)
        place_heads(s, 0, 0);
    else if (s->has_wide_weight)
        place_heads(s, 1, 1);
    else
        place_heads(s, 1, 0);
}

INLINE void gate_any(const struct rows *s, int narrow)
{
    if (narrow)
        gate(s, 1);
    else
        gate(s, 0);
}

#define PARAMETERS_OF_NORM                                                                                              \
    const struct rows *s, const void *added, const void *weight, int64_t stride, float eps, int narrow, int wide
#define VERSIONS(suffix, attributes)                                                                                    \
    attributes static void norm_##suffix(PARAMETERS_OF_NORM)                                                            \
    {                                                                                                                   \
        norm_any(s, added, weight, stride, eps, narrow, wide);                                                          \
    }                                                                                                                   \
    attributes static void rotate_##suffix(const struct rows *s, const void *cosines, const void *sines, int narrow)    \
    {                                                                                                                   \
        rotate_any(s, cosines, sines, narrow);                                                                          \
    }                                                                                                                   \
    attributes static void place_##suffix(const struct heads *s) { place_any(s); }                                      \
    attributes static void gate_##suffix(const struct rows *s, int narrow) { gate_any(s, narrow); }

VERSIONS(baseline, )
VERSIONS(avx2, WITH_AVX2)
VERSIONS(avx512, WITH_AVX512)

void baton_rms_norm_2(void *out, void *in, const void *added, const void *weight, int64_t rows, int64_t heads,
                      int64_t size, int64_t row_stride, int64_t head_stride, int64_t weight_stride, float eps, int narrow,
                      int wide, int level)
{
    struct rows s = {out, in, rows, heads, size, row_stride, head_stride};
    static void (*const of_level[NUM_LEVELS])(const struct rows *, const void *, const void *, int64_t, float, int,
                                              int) = {norm_baseline, norm_avx2, norm_avx512};
    of_level[usable(level)](&s, added, weight, weight_stride, eps, narrow, wide);
}

void baton_rotate_1(void *out, const void *in, const void *cosines, const void *sines, int64_t rows, int64_t heads,
                    int64_t size, int64_t row_stride, int64_t head_stride, int narrow, int level)
{
    struct rows s = {out, in, rows, heads, size, row_stride, head_stride};
    static void (*const of_level[NUM_LEVELS])(const struct rows *, const void *, const void *, int) = {
        rotate_baseline, rotate_avx2, rotate_avx512};
    of_level[usable(level)](&s, cosines, sines, narrow);
}

void baton_place_heads_1(const struct heads *s)
{
    static void (*const of_level[NUM_LEVELS])(const struct heads *) = {place_baseline, place_avx2, place_avx512};
    of_level[usable(s->level)](s);
}

void baton_gate_1(void *out, const void *in, int64_t rows, int64_t size, int64_t row_stride, int narrow, int level)
{
    struct rows s = {out, in, rows, 1, size, row_stride, 0};
    static void (*const of_level[NUM_LEVELS])(const struct rows *, int) = {gate_baseline, gate_avx2, gate_avx512};
    of_level[usable(level)](&s, narrow);
}
