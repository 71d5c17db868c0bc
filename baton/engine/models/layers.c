/* The decoder layers of a step in which each request has one token, in as many calls as connectors need.

   baton_layers_1(step, first, end)   computes parts `first` to `end`. 0, or the number of an error of torch.

       3 i        norm; queries, keys and values of layer i
       3 i + 1    norm and rotation of the heads, which go to the cache; attention
       3 i + 2    output, norm, MLP
       3 layers   the last norm

   `compiled_layers.py` calls it. Between the products, Python would have to load its code and objects again, because the
   weights have emptied the caches. Products are torch's, by its C interface for compiled models, whose functions
   Python passes. All else is that of `rows.c` and `decode.c`, so results are those of the layers in Python, bit by bit. */

#include <stddef.h>
#include <string.h>

#include "decode.h"

struct product {
    void *weight, *bias; /* Tensors of torch. `bias`: or null. */
    int64_t inputs, outputs;
};

struct layer {
    struct product qkv, output, gate_up, down;
    const void *input_norm, *post_norm, *heads_norm; /* `heads_norm`: or null. */
    void *cache;
    int64_t kind;
};

struct kind {
    const void *cosines, *sines; /* Null: no rotation. */
    const int64_t *slots;
    struct step *attention;
    int64_t rotated;
};

struct torch {
    int (*create)(void *, int64_t, const int64_t *, const int64_t *, int64_t, int32_t, int32_t, int32_t, void **);
    int (*delete)(void *);
    int (*address)(void *, void **);
    int (*multiply)(void *, void *, void **, const char *, const double **, int64_t, const char **, void **);
};

struct layers {
    struct torch torch;
    const struct layer *layers;
    const struct kind *kinds;
    const void *last_norm;
    int64_t num_layers, size, inner, num_heads, num_kv_heads, head_dim;
    int64_t is_bfloat16, has_wide_norms, level, dtype, cpu; /* Torch's numbers of the dtype, of a CPU. */
    double eps;
    /* Of a step; contiguous, in the model's dtype. `added`: not yet added to `hidden`. */
    void *hidden, *normed, *packed, *queries, *attended, *gated, *added;
    int64_t rows;
};

/* Of each struct that Python mirrors: its size, and the offset of its last field. A test compares them. */
const int64_t baton_structs[] = {
    sizeof(struct step),    offsetof(struct step, scale),
    sizeof(struct heads),   offsetof(struct heads, eps),
    sizeof(struct product), offsetof(struct product, outputs),
    sizeof(struct layer),   offsetof(struct layer, kind),
    sizeof(struct kind),    offsetof(struct kind, rotated),
    sizeof(struct layers),  offsetof(struct layers, rows),
};

static int multiply(const struct layers *s, const struct product *p, void *to, void *from)
{
    const int64_t sizes[] = {s->rows, p->inputs}, strides[] = {p->inputs, 1};
    void *x, *product = 0, *numbers = 0, *bias = p->bias;
    int error, ended;
    if ((error = s->torch.create(from, 2, sizes, strides, 0, (int32_t)s->dtype, (int32_t)s->cpu, 0, &x)))
        return error;
    error = s->torch.multiply(x, p->weight, bias ? &bias : 0, "none", 0, 0, 0, &product);
    ended = s->torch.delete(x);
    if (error || ended || (error = s->torch.address(product, &numbers)))
        return error ? error : ended;
    memcpy(to, numbers, (size_t)(s->rows * p->outputs * (s->is_bfloat16 ? 2 : 4)));
    return s->torch.delete(product);
}

static void norm(const struct layers *s, const void *added, const void *weight)
{
    baton_rms_norm_2(s->normed, s->hidden, added, weight, s->rows, 1, s->size, s->size, s->size, 0, (float)s->eps,
                     (int)s->is_bfloat16, (int)s->has_wide_norms, (int)s->level);
}

static int project(const struct layers *s, int64_t index)
{
    norm(s, index ? s->added : 0, s->layers[index].input_norm);
    return multiply(s, &s->layers[index].qkv, s->packed, s->normed);
}

static int attend(const struct layers *s, int64_t index)
{
    const struct layer *layer = s->layers + index;
    const struct kind *kind = s->kinds + layer->kind;
    struct heads heads = {
        s->queries, layer->cache, s->packed, layer->heads_norm, kind->cosines, kind->sines, kind->slots, s->rows,
        s->num_heads, s->num_kv_heads, s->head_dim, kind->rotated, layer->qkv.outputs, s->is_bfloat16,
        s->has_wide_norms, s->level, s->eps};
    baton_place_heads_1(&heads);
    kind->attention->out = s->attended;
    kind->attention->queries = s->queries;
    kind->attention->cache = layer->cache;
    kind->attention->sinks = 0;
    baton_decode_1(kind->attention);
    return 0;
}

static int transform(const struct layers *s, int64_t index)
{
    const struct layer *layer = s->layers + index;
    int error;
    if ((error = multiply(s, &layer->output, s->added, s->attended)))
        return error;
    norm(s, s->added, layer->post_norm);
    if ((error = multiply(s, &layer->gate_up, s->packed, s->normed)))
        return error;
    baton_gate_1(s->gated, s->packed, s->rows, s->inner, 2 * s->inner, (int)s->is_bfloat16, (int)s->level);
    return multiply(s, &layer->down, s->added, s->gated);
}

int baton_layers_1(const struct layers *s, int64_t first, int64_t end)
{
    static int (*const of_part[])(const struct layers *, int64_t) = {project, attend, transform};
    for (int64_t part = first; part < end; part++) {
        int error = 0;
        if (part == 3 * s->num_layers)
            norm(s, s->added, s->last_norm);
        else
            error = of_part[part % 3](s, part / 3);
        if (error)
            return error;
    }
    return 0;
}
