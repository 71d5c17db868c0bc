/* Attention of one query token for each of some requests, over the blocks of a paged cache.

   baton_decode_1(step)   computes one layer

   `compiled.py` calls it through ctypes, so there is no Python in it. The number in the name is the version of the
   interface. A head's keys are read once, where they lie, and its values once, in the order of the block table:

       scores of all keys -> softmax, with the sink if there is one -> weighted sum of values

   Numbers of the cache, queries and results are float32 or bfloat16. All is computed in float32. */

#include "decode.h"
#include "numbers.h"

#define ROWS_MAX 4 /* Query heads that are computed together. */
#define COLS_MAX 4 /* Vectors of a value that are summed together: ROWS_MAX of them fit into registers. */
#define KEYS_MAX 4 /* Keys that are scored together; as many as `sum_4` sums. */

/* Formats of numbers. PAIRS: bfloat16, in rows of a multiple of 2 LANES. */
enum { WIDE, NARROW, PAIRS };

/* The keys `key` to `end` of one head in one block: the address of the first is `at`. */
struct run {
    int64_t at, key, end;
};

INLINE struct run run_of(const struct step *s, const int64_t *table, int64_t head, int64_t key, int64_t end)
{
    int64_t block = key / s->block_tokens, after = (block + 1) * s->block_tokens;
    int64_t slot = key - block * s->block_tokens;
    struct run run = {table[block] * s->block_stride + head * s->head_stride + slot * s->token_stride, key,
                      after < end ? after : end};
    return run;
}

/* `LANES` numbers of a row that begins at `at`: the part `first + half`. Of PAIRS, a half is every other number of two
   parts, because this takes one instruction. */
INLINE void load_part(floats *to, const void *numbers, int64_t at, int64_t first, int half, int format)
{
    if (format == PAIRS) {
        words pairs;
        memcpy(&pairs, (const uint16_t *)numbers + at + first * LANES, sizeof pairs);
        pairs = half ? pairs & 0xffff0000 : pairs << 16;
        memcpy(to, &pairs, sizeof pairs);
    } else {
        load(to, numbers, at + (first + half) * LANES, format);
    }
}

/* The sums of four vectors, each as of `sum`. */
INLINE void sum_4(float *sums, const floats *of)
{
    floats4 parts[4], low, high;
    for (int i = 0; i < 4; i++) {
        floats8 a, b;
        floats4 c, d;
        memcpy(&a, of + i, sizeof a);
        memcpy(&b, (const char *)(of + i) + sizeof a, sizeof b);
        a += b;
        memcpy(&c, &a, sizeof c);
        memcpy(&d, (const char *)&a + sizeof c, sizeof d);
        parts[i] = c + d;
    }
    low = SHUFFLED(parts[0], parts[1], 0, 4, 1, 5) + SHUFFLED(parts[0], parts[1], 2, 6, 3, 7);
    high = SHUFFLED(parts[2], parts[3], 0, 4, 1, 5) + SHUFFLED(parts[2], parts[3], 2, 6, 3, 7);
    low = SHUFFLED(low, high, 0, 1, 4, 5) + SHUFFLED(low, high, 2, 3, 6, 7);
    memcpy(sums, &low, sizeof low);
}

/* `keys`: 1 or KEYS_MAX, from address `at` on. */
INLINE void score_keys(const struct step *s, int64_t at, const float *queries, float *scores, int format, int rows, int keys)
{
    floats products[ROWS_MAX][KEYS_MAX] = {{{0}}};
    const int step = format == PAIRS ? 2 : 1;
    for (int64_t part = 0; part < s->head_dim / LANES; part += step) {
        for (int half = 0; half < step; half++) {
            floats query[ROWS_MAX], numbers;
            for (int row = 0; row < rows; row++)
                memcpy(query + row, queries + row * s->head_dim + (part + half) * LANES, sizeof *query);
            for (int key = 0; key < keys; key++) {
                load_part(&numbers, s->cache, at + key * s->token_stride, part, half, format);
                for (int row = 0; row < rows; row++)
                    products[row][key] += query[row] * numbers;
            }
        }
    }
    for (int row = 0; row < rows; row++) {
        if (keys == KEYS_MAX)
            sum_4(scores + row * s->scores_stride, products[row]);
        else
            scores[row * s->scores_stride] = sum(&products[row][0]);
    }
}

/* `next`: address of the run that is read after this one. A block is too short for the hardware's prefetcher. */
INLINE void score_run(const struct step *s, struct run run, int64_t next, int64_t first, const float *queries,
                      float *scores, int format, int rows, int keys)
{
    int64_t bytes = 2 * s->head_dim * (format == WIDE ? 4 : 2);
    for (int count; run.key < run.end; run.key += count, run.at += count * s->token_stride) {
        count = run.end - run.key < keys ? 1 : keys;
        for (int key = 0; key < count; key++, next += s->token_stride)
            for (int64_t i = 0; i < bytes; i += LINE)
                __builtin_prefetch((const char *)s->cache + next * (format == WIDE ? 4 : 2) + i, 0, 2);
        if (count == keys)
            score_keys(s, run.at, queries, scores + run.key - first, format, rows, keys);
        else
            score_keys(s, run.at, queries, scores + run.key - first, format, rows, 1);
    }
}

INLINE void sum_run(const struct step *s, struct run run, int64_t first, int64_t part, const float *weights,
                    floats sums[ROWS_MAX][COLS_MAX], int format, int rows, int cols)
{
    for (; run.key < run.end; run.key++, run.at += s->token_stride) {
        for (int col = 0; col < cols; col++) {
            floats value;
            int half = format == PAIRS ? col % 2 : 0;
            load_part(&value, s->cache, run.at + s->head_dim, part + col - half, half, format);
            for (int row = 0; row < rows; row++)
                sums[row][col] += value * weights[row * s->scores_stride + run.key - first];
        }
    }
}

/* Replace the scores by their exponentials. Returns the inverse of their sum. */
INLINE float softmax(float *scores, int64_t count, const float *sink)
{
    float most = sink ? *sink : scores[0];
    for (int64_t i = 0; i < count; i++)
        most = scores[i] > most ? scores[i] : most;
    for (int64_t i = count; i % LANES; i++)
        scores[i] = -__builtin_inff();
    floats total = {0};
    for (int64_t i = 0; i < count; i += LANES) {
        floats part;
        memcpy(&part, scores + i, sizeof part);
        part -= most;
        exponential(&part);
        memcpy(scores + i, &part, sizeof part);
        total += part;
    }
    float whole = sum(&total);
    if (sink) {
        floats of_sink = (floats){0} + (*sink - most);
        exponential(&of_sink);
        whole += of_sink[0];
    }
    return 1.0f / whole;
}

/* The run with the key `offset` of the head that is read after a head; its last one, if it has less. */
INLINE struct run after_head(const struct step *s, int64_t index, int64_t head, int64_t offset)
{
    if (++head == s->num_heads) {
        head = 0;
        index += index + 1 < s->num_requests;
    }
    int64_t key = s->firsts[index] + offset, end = s->ends[index];
    const int64_t *table = s->tables + s->requests[index] * s->table_stride;
    return run_of(s, table, head, key < end ? key : end - 1, end);
}

INLINE void attend_parts(const struct step *s, int64_t index, int64_t head, int64_t row, int64_t part,
                         const float *scores, const float *inverse, int format, int rows, int cols)
{
    const int64_t *table = s->tables + s->requests[index] * s->table_stride;
    int64_t first = s->firsts[index], end = s->ends[index];
    floats sums[ROWS_MAX][COLS_MAX] = {{{0}}};
    for (int64_t key = first; key < end;) {
        struct run run = run_of(s, table, head, key, end);
        if (!part) {
            struct run next = after_head(s, index, head, key - first);
            int64_t width = format == WIDE ? 4 : 2;
            for (; next.key < next.end; next.key++, next.at += s->token_stride)
                for (int64_t i = 0; i < s->head_dim * width; i += LINE)
                    __builtin_prefetch((const char *)s->cache + next.at * width + i, 0, 2);
        }
        key = run.end;
        sum_run(s, run, first, part, scores, sums, format, rows, cols);
    }
    int64_t query_heads = s->num_heads * s->group_size;
    for (int r = 0; r < rows; r++) {
        int64_t at = (s->tokens[index] * query_heads + head * s->group_size + row + r) * s->head_dim + part * LANES;
        for (int col = 0; col < cols; col++) {
            floats result = sums[r][col] * inverse[r];
            if (format != PAIRS) {
                store(s->out, at + col * LANES, &result, format);
            } else if (col % 2) {
                floats evens = sums[r][col - 1] * inverse[r];
                narrowed(&evens);
                narrowed(&result);
                words pairs = (words)evens >> 16 | (words)result;
                memcpy((uint16_t *)s->out + at + (col - 1) * LANES, &pairs, sizeof pairs);
            }
        }
    }
}

/* `rows` query heads from `row` on of one KV head. */
INLINE void attend_rows(const struct step *s, int64_t index, int64_t head, int64_t row, int format, int rows,
                        int keys)
{
    const int64_t *table = s->tables + s->requests[index] * s->table_stride;
    int64_t first = s->firsts[index], end = s->ends[index], dim = s->head_dim;
    int64_t from = head * s->group_size + row, query_heads = s->num_heads * s->group_size;
    float *queries = s->scratch, *scores = s->scratch + ROWS_MAX * dim, inverse[ROWS_MAX];
    const int step = format == PAIRS ? 2 : 1;
    for (int64_t part = 0; part < rows * dim / LANES; part += step) {
        for (int half = 0; half < step; half++) {
            floats query;
            load_part(&query, s->queries, (s->tokens[index] * query_heads + from) * dim, part, half, format);
            query *= (float)s->scale;
            memcpy(queries + (part + half) * LANES, &query, sizeof query);
        }
    }
    for (int64_t key = first; key < end;) {
        struct run run = run_of(s, table, head, key, end);
        key = run.end;
        int64_t next = key < end ? run_of(s, table, head, key, end).at : after_head(s, index, head, 0).at;
        score_run(s, run, next, first, queries, scores, format, rows, keys);
    }
    for (int r = 0; r < rows; r++)
        inverse[r] = softmax(scores + r * s->scores_stride, end - first, s->sinks ? s->sinks + from + r : 0);
    int64_t part = 0;
    for (; part + COLS_MAX <= dim / LANES; part += COLS_MAX)
        attend_parts(s, index, head, row, part, scores, inverse, format, rows, COLS_MAX);
    for (; part < dim / LANES; part += step)
        attend_parts(s, index, head, row, part, scores, inverse, format, rows, step);
}

INLINE void decode(const struct step *s, int format, int keys)
{
    for (int64_t index = 0; index < s->num_requests; index++)
        for (int64_t head = 0; head < s->num_heads; head++)
            for (int64_t row = 0; row < s->group_size; row += ROWS_MAX)
                switch (s->group_size - row) {
                case 1:
                    attend_rows(s, index, head, row, format, 1, keys);
                    break;
                case 2:
                    attend_rows(s, index, head, row, format, 2, keys);
                    break;
                case 3:
                    attend_rows(s, index, head, row, format, 3, keys);
                    break;
                default:
                    attend_rows(s, index, head, row, format, ROWS_MAX, keys);
                }
}

INLINE void decode_any(const struct step *s, int keys)
{
    if (!s->is_bfloat16)
        decode(s, WIDE, 1);
    else if (s->head_dim % (2 * LANES))
        decode(s, NARROW, keys);
    else
        decode(s, PAIRS, keys);
}

WITH_AVX512 static void decode_avx512(const struct step *s) { decode_any(s, KEYS_MAX); }

/* The others have too few registers for more keys. */
WITH_AVX2 static void decode_avx2(const struct step *s) { decode_any(s, 1); }

static void decode_baseline(const struct step *s) { decode_any(s, 1); }

void baton_decode_1(const struct step *s)
{
    static void (*const of_level[NUM_LEVELS])(const struct step *) = {decode_baseline, decode_avx2, decode_avx512};
    of_level[usable(s->level)](s);
}
