/* Vectors of float32 numbers, which memory has as float32 or bfloat16 (`narrow`).

   A function takes pointers to vectors, because vectors as arguments depend on the instructions of the caller. */

#include <stdint.h>
#include <string.h>

#define LANES 16
#define LINE 64
#define INLINE static inline __attribute__((always_inline))

/* Sets of instructions, as `compiled.py` numbers them. Other processors than x86 have the baseline only. */
enum { BASELINE, AVX2, AVX512, NUM_LEVELS };

#if defined(__x86_64__)
#define WITH_AVX2 __attribute__((target("avx2,fma")))
#define WITH_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#else
#define WITH_AVX2
#define WITH_AVX512
#endif

/* The best set of this CPU, at most `level`. */
static inline int usable(int64_t level)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (level >= AVX512 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return AVX512;
    if (level >= AVX2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return AVX2;
#else
    (void)level;
#endif
    return BASELINE;
}

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef float floats8 __attribute__((vector_size(32)));
typedef float floats4 __attribute__((vector_size(16)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

/* Numbers of two vectors of four, counted through both. */
#if defined(__clang__)
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t ints4 __attribute__((vector_size(16)));
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, (ints4){__VA_ARGS__})
#endif

INLINE void load(floats *to, const void *numbers, int64_t at, int narrow)
{
    if (narrow) {
        halves half;
        memcpy(&half, (const uint16_t *)numbers + at, sizeof half);
        words wide = __builtin_convertvector(half, words) << 16;
        memcpy(to, &wide, sizeof wide);
    } else {
        memcpy(to, (const float *)numbers + at, sizeof *to);
    }
}

/* Round to bfloat16: to the nearest, ties to even. NaN stays NaN. */
INLINE void narrowed(floats *x)
{
    words word = (words)*x, is_number = (words)(*x == *x);
    word += is_number & (0x7fff + ((word >> 16) & 1));
    word &= 0xffff0000;
    memcpy(x, &word, sizeof word);
}

INLINE void store(void *numbers, int64_t at, const floats *from, int narrow)
{
    if (narrow) {
        floats rounded = *from;
        narrowed(&rounded);
        halves half = __builtin_convertvector((words)rounded >> 16, halves);
        memcpy((uint16_t *)numbers + at, &half, sizeof half);
    } else {
        memcpy((float *)numbers + at, from, sizeof *from);
    }
}

INLINE float sum(const floats *of)
{
    floats8 low, high;
    floats4 a, b;
    memcpy(&low, of, sizeof low);
    memcpy(&high, (const char *)of + sizeof low, sizeof high);
    low += high;
    memcpy(&a, &low, sizeof a);
    memcpy(&b, (const char *)&low + sizeof a, sizeof b);
    a += b;
    return (a[0] + a[2]) + (a[1] + a[3]);
}

/* e^x of numbers that are at most 0; to 2 ulp (Cephes, expf). 0 below -87. */
INLINE void exponential(floats *x)
{
    const float log2e = 1.44269504f, high = 0.693359375f, low = -2.12194440e-4f;
    ints is_small = *x < -87.0f, kept = (ints)*x & ~is_small;
    floats bounded, y;
    memcpy(&bounded, &kept, sizeof bounded);
    ints n = __builtin_convertvector(bounded * log2e - 0.5f, ints);
    floats whole = __builtin_convertvector(n, floats);
    floats r = bounded - whole * high - whole * low;
    y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    words bits = ((words)y + ((words)n << 23)) & ~(words)is_small;
    memcpy(x, &bits, sizeof bits);
}
