/* Gather of scattered blocks within one address space.

   baton_gather_1(local, remote, nbytes, count, level)   copies nbytes[i] bytes from remote[i] to local[i]
   baton_gather_level()                                  the highest level that this CPU has

   `gather.py` calls it through ctypes, which releases the interpreter's lock, so there is no Python in it. The
   number in the name is the version of the interface: a library of another version lacks the symbol.

   A block of a few KiB is too short for the hardware prefetcher. Therefore the bytes that are copied DISTANCE later,
   which may be of other blocks, are prefetched into the second cache, which waits for more lines at once than the
   first. Whole destination lines are written by streaming
   stores: an ordinary store first reads the line from memory. Sources may have any alignment. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LINE 64
#define CHUNK 256
#define DISTANCE 4096          /* Measured: 2 and 8 KiB are up to a fifth slower. */
#define STREAMED_MIN_BYTES 256 /* A shorter copy consists mostly of partial lines. */

enum { LEVEL_MEMCPY, LEVEL_AVX2, LEVEL_AVX512 };

typedef void copy_lines(char *to, const char *from, size_t lines);

/* The prefetched bytes end `offset` bytes into copy `index`, and `ahead` bytes of them are not copied yet. */
struct prefetch {
    const int64_t *remote, *nbytes;
    size_t index, count;
    int64_t offset, ahead;
};

static void prefetch_chunk(struct prefetch *next)
{
    int64_t wanted = CHUNK;
    while (wanted > 0 && next->index < next->count) {
        int64_t left = next->nbytes[next->index] - next->offset;
        if (left <= 0) {
            next->index++;
            next->offset = 0;
            continue;
        }
        int64_t part = left < wanted ? left : wanted;
        const char *from = (const char *)(uintptr_t)next->remote[next->index] + next->offset;
        for (int64_t i = 0; i < part; i += LINE)
            __builtin_prefetch(from + i, 0, 2);
        next->offset += part;
        wanted -= part;
    }
    next->ahead += CHUNK;
}

/* Call it before the next `bytes` bytes are copied. */
static inline void keep_ahead(struct prefetch *next, size_t bytes)
{
    while (next->ahead < DISTANCE + (int64_t)bytes)
        prefetch_chunk(next);
    next->ahead -= (int64_t)bytes;
}

static void lines_memcpy(char *to, const char *from, size_t lines) { memcpy(to, from, lines * LINE); }

#if defined(__x86_64__)
#include <immintrin.h>

__attribute__((target("avx512f"))) static void lines_avx512(char *to, const char *from, size_t lines)
{
    for (size_t i = 0; i < lines; i++)
        _mm512_stream_si512((__m512i *)(to + i * LINE), _mm512_loadu_si512(from + i * LINE));
}

__attribute__((target("avx2"))) static void lines_avx2(char *to, const char *from, size_t lines)
{
    for (size_t i = 0; i < lines; i++) {
        __m256i low = _mm256_loadu_si256((const __m256i *)(from + i * LINE));
        __m256i high = _mm256_loadu_si256((const __m256i *)(from + i * LINE + LINE / 2));
        _mm256_stream_si256((__m256i *)(to + i * LINE), low);
        _mm256_stream_si256((__m256i *)(to + i * LINE + LINE / 2), high);
    }
}

static copy_lines *lines_of(int level)
{
    return level == LEVEL_AVX512 ? lines_avx512 : level == LEVEL_AVX2 ? lines_avx2 : lines_memcpy;
}

int baton_gather_level(void)
{
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f"))
        return LEVEL_AVX512;
    return __builtin_cpu_supports("avx2") ? LEVEL_AVX2 : LEVEL_MEMCPY;
}

/* Streaming stores are ordered by nothing else. */
static void end_streaming(void) { _mm_sfence(); }
#else
static copy_lines *lines_of(int level)
{
    (void)level;
    return lines_memcpy;
}

int baton_gather_level(void) { return LEVEL_MEMCPY; }

static void end_streaming(void) {}
#endif

static void copy_streamed(char *to, const char *from, size_t bytes, copy_lines *lines, struct prefetch *next)
{
    size_t head = (size_t)(-(uintptr_t)to) % LINE;
    keep_ahead(next, head);
    memcpy(to, from, head);
    to += head, from += head, bytes -= head;
    while (bytes >= LINE) {
        size_t part = (bytes < CHUNK ? bytes : CHUNK) / LINE;
        keep_ahead(next, part * LINE);
        lines(to, from, part);
        to += part * LINE, from += part * LINE, bytes -= part * LINE;
    }
    keep_ahead(next, bytes);
    memcpy(to, from, bytes);
}

void baton_gather_1(const int64_t *local, const int64_t *remote, const int64_t *nbytes, size_t count, int level)
{
    copy_lines *lines = lines_of(level);
    struct prefetch next = {remote, nbytes, 0, count, 0, 0};
    for (size_t i = 0; i < count; i++) {
        char *to = (char *)(uintptr_t)local[i];
        const char *from = (const char *)(uintptr_t)remote[i];
        size_t bytes = (size_t)nbytes[i];
        if (bytes >= STREAMED_MIN_BYTES) {
            copy_streamed(to, from, bytes, lines, &next);
        } else {
            keep_ahead(&next, bytes);
            memcpy(to, from, bytes);
        }
    }
    end_streaming();
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* What the caller reads now is read after the blocks. */
}
