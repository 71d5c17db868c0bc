/* Messages of the tcp transport in compiled code: scattered bytes over a socket, and their GMAC on the way.

   baton_send_1       sends a message, whose last segment is its tag
   baton_receive_1    receives a message until it is whole, a descriptor wakes the caller, or the deadline passes
   baton_ghash_*_1    GHASH (NIST SP 800-38D) over bytes that are not in a message, and its keys

   `stream.py` calls it through ctypes, which releases the interpreter's lock. The number in a name is the version
   of the interface.

   A message is hashed in parts, while the processor's cache has them. The receiver is not woken for every part.
   GMAC is GHASH of the bytes and their length, encrypted by a mask. AES makes the hash key and the masks, in
   Python. No branch and no address depends on a key or on the bytes. */

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#define BLOCK 16
#define POWERS 32              /* Blocks that are multiplied before one reduction. */
#ifndef PART_BYTES
#define PART_BYTES (256 << 10) /* Moved and hashed at once: less than a processor's second cache has. */
#endif
#define AWAITED_BYTES (1 << 20) /* The receiver sleeps until so many have come: to be woken for each part costs more. */
#define PART_SEGMENTS 1024     /* UIO_MAXIOV */
#define CHUNK 2048             /* Prefetched at once. */
#define LINE 64

enum { WHOLE, WOKEN, CLOSED, TIMED_OUT }; /* Or a negative errno. `stream.py` has the same numbers. */

struct ghash_key {
    uint64_t powers[POWERS][2]; /* The hash key to the power of 32, 31, ... 1, each times x. */
    uint64_t level;             /* Of instructions. */
};

/* One message. `stream.py` has the same structure. */
struct ghash {
    const struct ghash_key *key;
    uint64_t bytes;
    uint64_t sum[2];
    uint8_t partial[BLOCK]; /* The first bytes % BLOCK bytes of a block. */
    uint8_t mask[BLOCK];
};

/* What is left of a message: header, payload segments, tag. `stream.py` has the same structure. */
struct message {
    struct iovec *segments; /* The first one that is not whole is shortened in place. */
    uint64_t count, index;
    uint64_t total_bytes, done_bytes;
};

/* Of each struct that Python mirrors: its size, and the offset of its last field. A test compares them. */
const int64_t baton_structs[] = {
    sizeof(struct ghash_key), offsetof(struct ghash_key, level),
    sizeof(struct ghash),     offsetof(struct ghash, mask),
    sizeof(struct message),   offsetof(struct message, done_bytes),
    sizeof(struct msghdr),    offsetof(struct msghdr, msg_flags),
};

#if defined(__x86_64__)
#include <immintrin.h>

#define SSE_CLMUL __attribute__((target("sse4.1,pclmul")))
#define AVX2_CLMUL __attribute__((target("avx2,vpclmulqdq,pclmul")))
#define AVX512_CLMUL __attribute__((target("avx512f,avx512bw,avx512vl,vpclmulqdq,pclmul")))

enum { LEVEL_NONE, LEVEL_CLMUL, LEVEL_AVX2, LEVEL_AVX512 };

/* x^127 + x^126 + x^121 + 1: the polynomial of GCM in its order of bits, without x^128. */
#define POLYNOMIAL_HIGH 0xc200000000000000

int baton_ghash_level_1(void)
{
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("pclmul") || !__builtin_cpu_supports("sse4.1"))
        return LEVEL_NONE;
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("vpclmulqdq"))
        return LEVEL_CLMUL;
    int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl");
    return wide ? LEVEL_AVX512 : LEVEL_AVX2;
}

SSE_CLMUL static inline __m128i load_block(const uint8_t *from)
{
    const __m128i reversed = _mm_set_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)from), reversed);
}

/* Two steps of Montgomery's reduction by 64 bits. */
SSE_CLMUL static inline __m128i ghash_reduce(__m128i low, __m128i middle, __m128i high)
{
    const __m128i polynomial = _mm_set_epi64x((int64_t)POLYNOMIAL_HIGH, 1);
    __m128i folded = _mm_xor_si128(_mm_shuffle_epi32(low, 0x4e), _mm_clmulepi64_si128(polynomial, low, 0x01));
    middle = _mm_xor_si128(middle, folded);
    folded = _mm_xor_si128(_mm_shuffle_epi32(middle, 0x4e), _mm_clmulepi64_si128(polynomial, middle, 0x01));
    return _mm_xor_si128(high, folded);
}

SSE_CLMUL static __m128i ghash_blocks(__m128i sum, const struct ghash_key *key, const uint8_t *from, size_t blocks)
{
    while (blocks) {
        size_t group = blocks < POWERS ? blocks : POWERS;
        __m128i low = _mm_setzero_si128(), middle = low, high = low;
        for (size_t i = 0; i < group; i++) {
            __m128i block = _mm_xor_si128(load_block(from + i * BLOCK), sum);
            __m128i power = _mm_loadu_si128((const __m128i *)key->powers[POWERS - group + i]);
            low = _mm_xor_si128(low, _mm_clmulepi64_si128(block, power, 0x00));
            high = _mm_xor_si128(high, _mm_clmulepi64_si128(block, power, 0x11));
            block = _mm_xor_si128(block, _mm_shuffle_epi32(block, 0x4e));
            power = _mm_xor_si128(power, _mm_shuffle_epi32(power, 0x4e));
            middle = _mm_xor_si128(middle, _mm_clmulepi64_si128(block, power, 0x00));
            sum = _mm_setzero_si128();
        }
        middle = _mm_xor_si128(middle, _mm_xor_si128(low, high)); /* Karatsuba: the sum of the three. */
        sum = ghash_reduce(low, middle, high);
        from += group * BLOCK, blocks -= group;
    }
    return sum;
}

AVX2_CLMUL static inline __m128i fold_lanes(__m256i lanes)
{
    return _mm_xor_si128(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
}

/* `ghash_blocks` for a multiple of POWERS blocks. */
AVX2_CLMUL static __m128i
ghash_groups_avx2(__m128i sum, const struct ghash_key *key, const uint8_t *from, size_t groups)
{
    const __m256i reversed =
        _mm256_broadcastsi128_si256(_mm_set_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    for (; groups; groups--, from += POWERS * BLOCK) {
        __m256i low = _mm256_setzero_si256(), middle = low, high = low;
        __m256i first = _mm256_zextsi128_si256(sum);
#pragma GCC unroll 16
        for (size_t i = 0; i < POWERS / 2; i++) {
            __m256i power = _mm256_loadu_si256((const __m256i *)key->powers[2 * i]);
            __m256i block = _mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i *)(from + i * 32)), reversed);
            block = _mm256_xor_si256(block, first);
            first = _mm256_setzero_si256();
            low = _mm256_xor_si256(low, _mm256_clmulepi64_epi128(block, power, 0x00));
            high = _mm256_xor_si256(high, _mm256_clmulepi64_epi128(block, power, 0x11));
            block = _mm256_xor_si256(block, _mm256_shuffle_epi32(block, 0x4e));
            power = _mm256_xor_si256(power, _mm256_shuffle_epi32(power, 0x4e));
            middle = _mm256_xor_si256(middle, _mm256_clmulepi64_epi128(block, power, 0x00));
        }
        middle = _mm256_xor_si256(middle, _mm256_xor_si256(low, high));
        sum = ghash_reduce(fold_lanes(low), fold_lanes(middle), fold_lanes(high));
    }
    return sum;
}

AVX512_CLMUL static inline __m128i fold_lanes_avx512(__m512i lanes)
{
    return fold_lanes(_mm256_xor_si256(_mm512_castsi512_si256(lanes), _mm512_extracti64x4_epi64(lanes, 1)));
}

/* `ghash_blocks` for a multiple of POWERS blocks. */
AVX512_CLMUL static __m128i
ghash_groups_avx512(__m128i sum, const struct ghash_key *key, const uint8_t *from, size_t groups)
{
    const __m512i reversed =
        _mm512_broadcast_i32x4(_mm_set_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    __m512i power[POWERS / 4], cross[POWERS / 4]; /* In `cross` the two halves of each power are added. */
    for (size_t i = 0; i < POWERS / 4; i++) {
        power[i] = _mm512_loadu_si512(key->powers[4 * i]);
        cross[i] = _mm512_xor_si512(power[i], _mm512_shuffle_epi32(power[i], 0x4e));
    }
    for (; groups; groups--, from += POWERS * BLOCK) {
        __m512i low = _mm512_setzero_si512(), middle = low, high = low;
        __m512i first = _mm512_zextsi128_si512(sum);
#pragma GCC unroll 8
        for (size_t i = 0; i < POWERS / 4; i++) {
            __m512i block = _mm512_shuffle_epi8(_mm512_loadu_si512(from + i * 64), reversed);
            block = _mm512_xor_si512(block, first);
            first = _mm512_setzero_si512();
            low = _mm512_xor_si512(low, _mm512_clmulepi64_epi128(block, power[i], 0x00));
            high = _mm512_xor_si512(high, _mm512_clmulepi64_epi128(block, power[i], 0x11));
            block = _mm512_xor_si512(block, _mm512_shuffle_epi32(block, 0x4e));
            middle = _mm512_xor_si512(middle, _mm512_clmulepi64_epi128(block, cross[i], 0x00));
        }
        middle = _mm512_ternarylogic_epi64(middle, low, high, 0x96);
        sum = ghash_reduce(fold_lanes_avx512(low), fold_lanes_avx512(middle), fold_lanes_avx512(high));
    }
    return sum;
}

/* `h`: AES of a block of zeros. `level`: not 0, and at most that of this CPU. */
SSE_CLMUL void baton_ghash_key_1(struct ghash_key *key, const uint8_t *h, int level)
{
    key->level = (uint64_t)level;
    uint64_t low, high;
    memcpy(&high, h, 8), memcpy(&low, h + 8, 8);
    high = __builtin_bswap64(high), low = __builtin_bswap64(low);
    /* Times x, so that the products of blocks, whose bits are in reverse order, need no shift. */
    uint64_t carry = (uint64_t)0 - (high >> 63);
    high = (high << 1 | low >> 63) ^ (carry & POLYNOMIAL_HIGH);
    low = low << 1 ^ (carry & 1);
    __m128i one = _mm_set_epi64x((int64_t)high, (int64_t)low), power = one;
    for (size_t i = POWERS; i--;) {
        _mm_storeu_si128((__m128i *)key->powers[i], power);
        power = ghash_reduce(_mm_clmulepi64_si128(power, one, 0x00),
                             _mm_xor_si128(_mm_clmulepi64_si128(power, one, 0x01),
                                           _mm_clmulepi64_si128(power, one, 0x10)),
                             _mm_clmulepi64_si128(power, one, 0x11));
    }
}

SSE_CLMUL static void ghash_whole_blocks(struct ghash *hash, const uint8_t *from, size_t blocks)
{
    __m128i sum = _mm_loadu_si128((const __m128i *)hash->sum);
    if (hash->key->level >= LEVEL_AVX2) {
        int is_avx2 = hash->key->level == LEVEL_AVX2;
        sum = (is_avx2 ? ghash_groups_avx2 : ghash_groups_avx512)(sum, hash->key, from, blocks / POWERS);
        from += blocks / POWERS * POWERS * BLOCK, blocks %= POWERS;
    }
    _mm_storeu_si128((__m128i *)hash->sum, ghash_blocks(sum, hash->key, from, blocks));
}
#else
int baton_ghash_level_1(void) { return 0; }

/* `stream.py` hashes nothing if the level is 0. */
void baton_ghash_key_1(struct ghash_key *key, const uint8_t *h, int level) { (void)key, (void)h, (void)level; }

static void ghash_whole_blocks(struct ghash *hash, const uint8_t *from, size_t blocks)
{
    (void)hash, (void)from, (void)blocks;
}
#endif

void baton_ghash_add_1(struct ghash *hash, const uint8_t *from, size_t bytes)
{
    size_t begun = hash->bytes % BLOCK;
    hash->bytes += bytes;
    if (begun) {
        size_t head = BLOCK - begun < bytes ? BLOCK - begun : bytes;
        memcpy(hash->partial + begun, from, head);
        from += head, bytes -= head;
        if (begun + head < BLOCK)
            return;
        ghash_whole_blocks(hash, hash->partial, 1);
    }
    ghash_whole_blocks(hash, from, bytes / BLOCK);
    memcpy(hash->partial, from + bytes / BLOCK * BLOCK, bytes % BLOCK);
}

/* Writes the tag. Nothing can be added afterwards. */
void baton_ghash_tag_1(struct ghash *hash, uint8_t *tag)
{
    uint8_t lengths[BLOCK] = {0}; /* All bytes are additional data, and there is no ciphertext. */
    uint64_t bits = __builtin_bswap64(hash->bytes * CHAR_BIT);
    memcpy(lengths, &bits, sizeof bits);
    if (hash->bytes % BLOCK) {
        memset(hash->partial + hash->bytes % BLOCK, 0, BLOCK - hash->bytes % BLOCK);
        ghash_whole_blocks(hash, hash->partial, 1);
    }
    ghash_whole_blocks(hash, lengths, 1);
    for (size_t i = 0; i < BLOCK; i++)
        tag[i] = (uint8_t)(hash->sum[1 - i / 8] >> (56 - i % 8 * 8)) ^ hash->mask[i];
}

static int64_t rest_ms(int64_t deadline_ns)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t rest_ns = deadline_ns - (now.tv_sec * 1000000000LL + now.tv_nsec);
    return rest_ns > 0 ? (rest_ns + 999999) / 1000000 : 0;
}

/* 1: one of the descriptors is ready; 0: the deadline has passed; or a negative errno. */
static int wait_for(struct pollfd *descriptors, nfds_t count, int64_t deadline_ns)
{
    for (;;) {
        int64_t rest = rest_ms(deadline_ns);
        if (rest == 0)
            return 0;
        int ready = poll(descriptors, count, rest < INT_MAX ? (int)rest : INT_MAX);
        if (ready > 0)
            return 1;
        if (ready < 0 && errno != EINTR)
            return -errno;
    }
}

/* The next bytes of a message, at most `bytes_max`, as segments. Returns the number of segments. */
static size_t next_part(const struct message *message, size_t bytes_max, struct iovec *part)
{
    size_t count = 0;
    for (size_t i = message->index; i < message->count && count < PART_SEGMENTS && bytes_max; i++) {
        part[count] = message->segments[i];
        if (part[count].iov_len > bytes_max)
            part[count].iov_len = bytes_max;
        bytes_max -= part[count++].iov_len;
    }
    return count;
}

static void advance(struct message *message, size_t bytes)
{
    message->done_bytes += bytes;
    for (; message->index < message->count; message->index++) {
        struct iovec *segment = &message->segments[message->index];
        if (bytes < segment->iov_len) {
            segment->iov_base = (char *)segment->iov_base + bytes;
            segment->iov_len -= bytes;
            return;
        }
        bytes -= segment->iov_len;
    }
}

/* The segments that are not prefetched yet, the first from `offset` on. The hardware prefetches only within a page. */
struct prefetch {
    const struct iovec *segments;
    size_t count, offset;
};

static void prefetch(struct prefetch *next, size_t bytes)
{
    while (bytes && next->count) {
        size_t left = next->segments->iov_len - next->offset;
        size_t part = left < bytes ? left : bytes;
        const char *from = (const char *)next->segments->iov_base + next->offset;
        for (size_t i = 0; i < part; i += LINE)
            __builtin_prefetch(from + i, 0, 2);
        next->offset += part, bytes -= part;
        if (part == left)
            next->segments++, next->count--, next->offset = 0;
    }
}

/* Hashes the payload of a part, which is the front of what is left of a message. */
static void hash_payload(struct ghash *hash, const struct message *left, const struct iovec *part, size_t count,
                         struct prefetch *next)
{
    for (size_t i = 0; i < count; i++) {
        if (left->index + i == 0 || left->index + i + 1 == left->count)
            continue; /* The header, or the tag. */
        const uint8_t *from = part[i].iov_base;
        for (size_t rest = part[i].iov_len; rest;) {
            size_t chunk = rest < CHUNK ? rest : CHUNK;
            prefetch(next, chunk);
            baton_ghash_add_1(hash, from, chunk);
            from += chunk, rest -= chunk;
        }
    }
}

static int send_segments(int fd, struct message *message, int64_t deadline_ns)
{
    while (message->done_bytes < message->total_bytes) {
        size_t count = message->count - message->index;
        struct msghdr header = {
            .msg_iov = message->segments + message->index,
            .msg_iovlen = count < PART_SEGMENTS ? count : PART_SEGMENTS,
        };
        ssize_t sent = sendmsg(fd, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent >= 0) {
            advance(message, (size_t)sent);
        } else if (errno == EAGAIN) {
            struct pollfd writable = {.fd = fd, .events = POLLOUT};
            int ready = wait_for(&writable, 1, deadline_ns);
            if (ready <= 0)
                return ready ? ready : TIMED_OUT;
        } else if (errno != EINTR) {
            return -errno;
        }
    }
    return WHOLE;
}

/* Sends the whole message. With `hash` its tag is written into the last segment on the way. */
int baton_send_1(int fd, struct message *message, struct ghash *hash, int64_t deadline_ns)
{
    int outcome = WHOLE, has_tag = 0;
    if (!hash)
        return send_segments(fd, message, deadline_ns);
    while (outcome == WHOLE && message->done_bytes < message->total_bytes) {
        struct iovec part[PART_SEGMENTS];
        size_t count = next_part(message, PART_BYTES, part);
        struct prefetch next = {part, count, 0};
        prefetch(&next, CHUNK);
        hash_payload(hash, message, part, count, &next);
        if (!has_tag && message->index + count == message->count) { /* A part may end within the tag. */
            baton_ghash_tag_1(hash, message->segments[message->count - 1].iov_base);
            has_tag = 1;
        }
        struct message sending = {.segments = part, .count = count};
        for (size_t i = 0; i < count; i++)
            sending.total_bytes += part[i].iov_len;
        outcome = send_segments(fd, &sending, deadline_ns);
        advance(message, sending.done_bytes);
    }
    return outcome;
}

/* The socket counts as readable from `bytes` on, or if it is closed or its buffer is full. */
static void await_bytes(int fd, int bytes, int *awaited)
{
    if (*awaited != bytes)
        setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes); /* Only slower if it fails. */
    *awaited = bytes;
}

static int receive_segments(int fd, int wake_fd, int wants_to_send, struct message *message, struct ghash *hash,
                            int64_t deadline_ns, int *awaited)
{
    struct iovec part[PART_SEGMENTS];
    while (message->done_bytes < message->total_bytes) {
        struct msghdr header = {.msg_iov = part, .msg_iovlen = next_part(message, PART_BYTES, part)};
        ssize_t received = recvmsg(fd, &header, MSG_DONTWAIT);
        if (received > 0) {
            if (hash) {
                struct prefetch nothing = {0};
                hash_payload(hash, message, part, next_part(message, (size_t)received, part), &nothing);
            }
            advance(message, (size_t)received);
        } else if (received == 0) {
            return CLOSED;
        } else if (errno == EAGAIN) {
            uint64_t rest = message->total_bytes - message->done_bytes;
            await_bytes(fd, rest < AWAITED_BYTES ? (int)rest : AWAITED_BYTES, awaited);
            struct pollfd descriptors[] = {
                {.fd = fd, .events = (short)(POLLIN | (wants_to_send ? POLLOUT : 0))},
                {.fd = wake_fd, .events = POLLIN},
            };
            int ready = wait_for(descriptors, 2, deadline_ns);
            if (ready <= 0)
                return ready ? ready : TIMED_OUT;
            if (descriptors[1].revents || descriptors[0].revents & POLLOUT)
                return WOKEN;
        } else if (errno != EINTR) {
            return -errno;
        }
    }
    return WHOLE;
}

/* Receives until the message is whole, `wake_fd` can be read, or `fd` can be written and `wants_to_send`. Hashes
   the payload into `hash`, if there is one. It can be called again for the rest. */
int baton_receive_1(int fd, int wake_fd, int wants_to_send, struct message *message, struct ghash *hash,
                    int64_t deadline_ns)
{
    int awaited = 1;
    int outcome = receive_segments(fd, wake_fd, wants_to_send, message, hash, deadline_ns, &awaited);
    await_bytes(fd, 1, &awaited);
    return outcome;
}
