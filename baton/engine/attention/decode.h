/* What the compiled code of decode steps calls of each other: see `decode.c` and `rows.c`. */

#include <stdint.h>

struct step {
    void *out;                                         /* [T, Q * D] */
    const void *queries, *cache;                       /* [T, Q, D]; blocks. */
    const float *sinks;                                /* [Q], or null. */
    const int64_t *tables;                             /* Block ids, `table_stride` of each request. */
    const int64_t *requests, *tokens, *firsts, *ends;  /* Row in `tables`, in `queries`; first key, end of keys. */
    float *scratch;                                    /* ROWS_MAX * (D + most keys, to a multiple of LANES) */
    int64_t num_requests, table_stride, block_tokens;
    int64_t block_stride, head_stride, token_stride;   /* In numbers. */
    int64_t num_heads, group_size, head_dim;           /* KV heads; query heads of each; D, a multiple of LANES. */
    int64_t scores_stride, is_bfloat16, level;         /* `level`: as in `usable`. */
    double scale;
};

struct heads {
    void *queries;        /* [rows, num_heads, size] */
    void *cache;          /* Slots of a key and a value, each of `size`. */
    const void *packed;   /* Of each row the heads of queries, keys and values, each of `size`, a multiple of LANES. */
    const void *weight;   /* Of the norm of queries and keys, [num_heads + num_kv_heads, size]. Null: no norm. */
    const void *cosines;  /* [rows, rotated], as `rotate` takes them. Null: no rotation. */
    const void *sines;
    const int64_t *slots; /* [rows, num_kv_heads] */
    int64_t rows, num_heads, num_kv_heads, size, rotated, row_stride;
    int64_t is_bfloat16, has_wide_weight, level;
    double eps;
};

void baton_decode_1(const struct step *s);
void baton_place_heads_1(const struct heads *s);
void baton_gate_1(void *out, const void *in, int64_t rows, int64_t size, int64_t row_stride, int narrow, int level);
void baton_rms_norm_2(void *out, void *in, const void *added, const void *weight, int64_t rows, int64_t heads,
                      int64_t size, int64_t row_stride, int64_t head_stride, int64_t weight_stride, float eps, int narrow,
                      int wide, int level);
