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

/* `next`: address of the run that is read after this one. A block is too short for the hardware's prefetcher. */
INLINE void score_run(const struct step *s, struct run run, int64_t next, int64_t first, const float *queries,
                      float *scores, int narrow, int rows)
{
    int64_t dim = s->head_dim, size = narrow ? 2 : 4;
    for (; run.key < run.end; run.key++, run.at += s->token_stride, next += s->token_stride) {
        for (int64_t i = 0; i < 2 * dim * size; i += LINE)
            __builtin_prefetch((const char *)s->cache + next * size + i, 0, 2);
        floats products[ROWS_MAX] = {{0}};
        for (int64_t i = 0; i < dim; i += LANES) {
            floats key;
            load(&key, s->cache, run.at + i, narrow);
            for (int row = 0; row < rows; row++) {
                floats query;
                memcpy(&query, queries + row * dim + i, sizeof query);
                products[row] += query * key;
            }
        }
        for (int row = 0; row < rows; row++)
            scores[row * s->scores_stride + run.key - first] = sum(&products[row]);
    }
}

INLINE void sum_run(const struct step *s, struct run run, int64_t first, int64_t column, const float *weights,
                    floats sums[ROWS_MAX][COLS_MAX], int narrow, int rows, int cols)
{
    for (; run.key < run.end; run.key++, run.at += s->token_stride) {
        for (int col = 0; col < cols; col++) {
            floats value;
            load(&value, s->cache, run.at + s->head_dim + column + col * LANES, narrow);
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

INLINE void attend_columns(const struct step *s, int64_t index, int64_t head, int64_t row, int64_t column,
                           const float *scores, const float *inverse, int narrow, int rows, int cols)
{
    const int64_t *table = s->tables + s->requests[index] * s->table_stride;
    int64_t first = s->firsts[index], end = s->ends[index];
    floats sums[ROWS_MAX][COLS_MAX] = {{{0}}};
    for (int64_t key = first; key < end;) {
        struct run run = run_of(s, table, head, key, end);
        key = run.end;
        sum_run(s, run, first, column, scores, sums, narrow, rows, cols);
    }
    int64_t query_heads = s->num_heads * s->group_size;
    for (int r = 0; r < rows; r++) {
        int64_t at = (s->tokens[index] * query_heads + head * s->group_size + row + r) * s->head_dim + column;
        for (int col = 0; col < cols; col++) {
            floats result = sums[r][col] * inverse[r];
            store(s->out, at + col * LANES, &result, narrow);
        }
    }
}

/* The address of the keys that are read after those of a head. */
INLINE int64_t after_head(const struct step *s, int64_t index, int64_t head)
{
    if (++head == s->num_heads) {
        head = 0;
        index += index + 1 < s->num_requests;
    }
    const int64_t *table = s->tables + s->requests[index] * s->table_stride;
    return run_of(s, table, head, s->firsts[index], s->ends[index]).at;
}

/* `rows` query heads from `row` on of one KV head. */
INLINE void attend_rows(const struct step *s, int64_t index, int64_t head, int64_t row, int narrow, int rows)
{
    const int64_t *table = s->tables + s->requests[index] * s->table_stride;
    int64_t first = s->firsts[index], end = s->ends[index], dim = s->head_dim;
    int64_t from = head * s->group_size + row, query_heads = s->num_heads * s->group_size;
    float *queries = s->scratch, *scores = s->scratch + ROWS_MAX * dim, inverse[ROWS_MAX];
    for (int64_t i = 0; i < rows * dim; i += LANES) {
        floats query;
        load(&query, s->queries, (s->tokens[index] * query_heads + from) * dim + i, narrow);
        query *= (float)s->scale;
        memcpy(queries + i, &query, sizeof query);
    }
    for (int64_t key = first; key < end;) {
        struct run run = run_of(s, table, head, key, end);
        key = run.end;
        int64_t next = key < end ? run_of(s, table, head, key, end).at : after_head(s, index, head);
        score_run(s, run, next, first, queries, scores, narrow, rows);
    }
    for (int r = 0; r < rows; r++)
        inverse[r] = softmax(scores + r * s->scores_stride, end - first, s->sinks ? s->sinks + from + r : 0);
    int64_t column = 0;
    for (; column + COLS_MAX * LANES <= dim; column += COLS_MAX * LANES)
        attend_columns(s, index, head, row, column, scores, inverse, narrow, rows, COLS_MAX);
    for (; column < dim; column += LANES)
        attend_columns(s, index, head, row, column, scores, inverse, narrow, rows, 1);
}

INLINE void decode(const struct step *s, int narrow)
{
    for (int64_t index = 0; index < s->num_requests; index++)
        for (int64_t head = 0; head < s->num_heads; head++)
            for (int64_t row = 0; row < s->group_size; row += ROWS_MAX)
                switch (s->group_size - row) {
                case 1:
                    attend_rows(s, index, head, row, narrow, 1);
                    break;
                case 2:
                    attend_rows(s, index, head, row, narrow, 2);
                    break;
                case 3:
                    attend_rows(s, index, head, row, narrow, 3);
                    break;
                default:
                    attend_rows(s, index, head, row, narrow, ROWS_MAX);
                }
}

INLINE void decode_any(const struct step *s)
{
    if (s->is_bfloat16)
        decode(s, 1);
    else
        decode(s, 0);
}

WITH_AVX512 static void decode_avx512(const struct step *s) { decode_any(s); }

WITH_AVX2 static void decode_avx2(const struct step *s) { decode_any(s); }

static void decode_baseline(const struct step *s) { decode_any(s); }

void baton_decode_1(const struct step *s)
{
    static void (*const of_level[NUM_LEVELS])(const struct step *) = {decode_baseline, decode_avx2, decode_avx512};
    of_level[usable(s->level)](s);
}
