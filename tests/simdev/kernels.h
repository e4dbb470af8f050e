/* What the simulated accelerator computes, tile by tile. Part of simdev.c. */
#define TILE_M 96
#define TILE_N 160
#define TILE_K 48
#define TILE_TOPK 768
#define TILE_CAST 384
#define NAN_SENTINEL 0x3F3F3F3F
#define LARGEST_E4M3 448.0f
#define ONE_AS_EXPONENT 127

static const int SIZE[] = {1, 2, 4, 4};

static int over(int n, int tile) { return (n + tile - 1) / tile; }
static int least(int a, int b) { return a < b ? a : b; }
static uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }

static uint8_t *at(sim_device *dev, const sim_matrix *x, int64_t row, int64_t column) {
    block_t *b = find(dev, x->mem);
    return b ? dev->memory + b->address + x->offset + (row * x->row_stride + column * x->column_stride) * SIZE[x->type] : NULL;
}

/* Whether every element lies in device memory. */
static int reaches(sim_device *dev, const sim_matrix *x, int rows, int columns) {
    uint8_t *p = at(dev, x, 0, 0), *q = p ? at(dev, x, rows - 1, columns - 1) : NULL;
    if (!p) return SIM_E_HANDLE;
    uint8_t *lo = p < q ? p : q, *hi = p < q ? q : p;
    return lo < dev->memory || hi + SIZE[x->type] > dev->memory + SIM_MEMORY_BYTES ? SIM_E_FAULT : SIM_OK;
}

static float load(const uint8_t *p, int type) {
    uint16_t half;
    float x;
    if (type == SIM_F32) return memcpy(&x, p, 4), x;
    return memcpy(&half, p, 2), float_of((uint32_t)half << 16);
}

static uint16_t bf16_of(float x, int cut) { /* nearest, ties to even */
    uint32_t u = bits_of(x);
    if (x != x) return (u >> 16) | 0x40;
    return (cut ? u : u + 0x7FFF + ((u >> 16) & 1)) >> 16;
}

static void store(uint8_t *p, int type, float x, int cut) {
    uint16_t half = bf16_of(x, cut);
    if (type == SIM_F32) memcpy(p, &x, 4);
    else memcpy(p, &half, 2);
}

/* A tile of an operand, zeros behind its ends. by_k: tile[k][row], else tile[row][k]. */
static void fetch(sim_device *dev, const sim_matrix *x, int row, int k, int rows, int ks, int width, int by_k, int dirty,
                  float *tile) {
    for (int i = 0; i < width; i++)
        for (int j = 0; j < TILE_K; j++) {
            float *to = by_k ? &tile[j * width + i] : &tile[i * TILE_K + j];
            if (i < rows && j < ks) *to = load(at(dev, x, row + i, k + j), x->type);
            else if (!dirty || i >= rows) *to = 0;
        }
}

static int run_gemm(sim_device *dev, const sim_gemm_args *g) {
    static _Thread_local float a[TILE_M * TILE_K], b[TILE_K * TILE_N], sum[TILE_M * TILE_N];
    int code = reaches(dev, &g->d, g->m, g->n), tiles_k = over(g->k, TILE_K);
    if (!code && g->k) code = reaches(dev, &g->a, g->m, g->k);
    if (!code && g->k) code = reaches(dev, &g->b, g->n, g->k);
    if (!code && g->c.mem) code = reaches(dev, &g->c, g->m, g->n);
    if (code) return code;
    int twice = is(dev, "second_k_twice"), swap = is(dev, "swap_columns"), dirty = is(dev, "dirty_k_tail");
    int reverse = is(dev, "reverse_k"), cut = is(dev, "truncate");
    for (int m = 0; m < g->m; m += TILE_M)
        for (int n = 0; n < g->n; n += TILE_N) {
            int rows = least(TILE_M, g->m - m), columns = least(TILE_N, g->n - n);
            if (!(is(dev, "keep_sums") && n)) memset(sum, 0, sizeof sum);
            for (int t = 0; t < tiles_k + (twice && tiles_k > 1); t++) {
                int tile = t == tiles_k ? 1 : reverse ? tiles_k - 1 - t : t, k = tile * TILE_K;
                int ks = least(TILE_K, g->k - k);
                if (is(dev, "drop_k_tail") && tile && ks < TILE_K) continue;
                if (!(is(dev, "stale_a") && m && tile == 1))
                    fetch(dev, &g->a, m, k, rows, ks, TILE_M, 0, dirty && tile, a);
                if (!(is(dev, "stale_b") && n && tile == 1))
                    fetch(dev, &g->b, n, k, columns, ks, TILE_N, 1, dirty && tile, b);
                for (int i = 0; i < rows; i++)
                    for (int kk = 0; kk < TILE_K; kk++)
                        for (int j = 0; j < TILE_N; j++) sum[i * TILE_N + j] += a[i * TILE_K + kk] * b[kk * TILE_N + j];
            }
            if ((is(dev, "drop_m_tail") && m && rows < TILE_M) || (is(dev, "drop_n_tail") && n && columns < TILE_N)) continue;
            if (is(dev, "short_m_tail") && m) rows--;
            for (int i = 0; i < rows; i++)
                for (int j = 0; j < columns; j++) {
                    int from = swap && n && j < 2 && columns > 1 ? 1 - j : j;
                    float x = sum[i * TILE_N + from] * g->alpha;
                    if (g->c.mem) x += load(at(dev, &g->c, m + i, n + j), g->c.type);
                    store(at(dev, &g->d, m + i, n + j), g->d.type, x, cut);
                }
        }
    double moved = 2.0 * g->k * ((double)g->m * over(g->n, TILE_N) + (double)g->n * over(g->m, TILE_M));
    work(dev, SIM_LAUNCH_S + moved / SIM_BYTES_PER_S + (double)over(g->m, TILE_M) * TILE_M * over(g->n, TILE_N) * TILE_N *
         tiles_k * TILE_K / SIM_MACS_PER_S);
    return SIM_OK;
}

/* A number that orders as the value does, -0 and 0 being one. */
static uint32_t order_key(float x) {
    uint32_t u = bits_of(x);
    if (u == 0x80000000u) u = 0;
    return u >> 31 ? ~u : u | 0x80000000u;
}

typedef struct { uint32_t key; int32_t column; } entry_t;

static int descending(const void *a, const void *b) {
    const entry_t *x = a, *y = b;
    return x->key != y->key ? (x->key < y->key ? 1 : -1) : (x->column > y->column) - (x->column < y->column);
}

/* The n-th largest key of a row, and how many of the keys equal to it belong to the n largest. */
static uint32_t threshold(const entry_t *row, int columns, int n, int *ties) {
    uint32_t prefix = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int count[256] = {0}, digit = 255;
        for (int i = 0; i < columns; i++)
            if (shift == 24 || row[i].key >> (shift + 8) == prefix >> (shift + 8)) count[row[i].key >> shift & 255]++;
        while (count[digit] < n) n -= count[digit--];
        prefix |= (uint32_t)digit << shift;
    }
    *ties = n;
    return prefix;
}

static int run_topk(sim_device *dev, const sim_topk_args *t) {
    int code = reaches(dev, &t->x, t->rows, t->columns);
    if (!code) code = reaches(dev, &t->indices, t->rows, t->k);
    if (!code && t->values.mem) code = reaches(dev, &t->values, t->rows, t->k);
    if (!code && t->end.mem) code = reaches(dev, &t->end, t->rows, 1);
    if (!code && t->offsets.mem) code = reaches(dev, &t->offsets, t->rows, 1);
    if (code) return code;
    entry_t *row = malloc((t->columns + 1) * sizeof *row), *kept = malloc((t->k + 1) * sizeof *kept);
    if (!row || !kept) return free(row), free(kept), SIM_E_SYSTEM;
    for (int r = 0; r < t->rows; r++) {
        int32_t end = t->columns, offset = 0;
        int seen = 0, nan = 0, n = 0, ties = 0;
        if (t->end.mem) memcpy(&end, at(dev, &t->end, r, 0), 4);
        if (t->offsets.mem) memcpy(&offset, at(dev, &t->offsets, r, 0), 4);
        end = end < 0 ? 0 : least(end, t->columns);
        int full = end / TILE_TOPK * TILE_TOPK, looked = is(dev, "topk_drop_tail") && full ? full : end;
        for (int c = 0; c < looked; c++) {
            float x = load(at(dev, &t->x, r, c), t->x.type);
            nan |= x != x;
            row[seen++] = (entry_t){order_key(x), c};
            if (c == TILE_TOPK && is(dev, "topk_border_twice")) row[seen++] = row[c - 1];
        }
        uint32_t lowest = seen > t->k ? threshold(row, seen, t->k, &ties) : 0;
        if (seen <= t->k) ties = seen;
        for (int i = 0; i < seen && n < t->k; i++)
            if (row[i].key > lowest || (row[i].key == lowest && ties-- > 0)) kept[n++] = row[i];
        if (t->order) qsort(kept, n, sizeof *kept, descending);
        for (int i = 0; i < t->k; i++) {
            int32_t index = i < n ? (int32_t)((uint32_t)kept[i].column + (uint32_t)offset) : t->index_fill - is(dev, "topk_fill");
            memcpy(at(dev, &t->indices, r, i), &index, 4);
            if (!t->values.mem) continue;
            if (i < n) memcpy(at(dev, &t->values, r, i), at(dev, &t->x, r, kept[i].column), SIZE[t->x.type]);
            else store(at(dev, &t->values, r, i), t->values.type, t->value_fill, 0);
        }
        int32_t sentinel = NAN_SENTINEL;
        if (nan && end > t->k) {
            if (t->trap_nan) return free(row), free(kept), SIM_E_TRAP;
            memcpy(at(dev, &t->indices, r, 0), &sentinel, 4);
        }
    }
    free(row), free(kept);
    work(dev, SIM_LAUNCH_S + (double)t->rows * t->columns * (SIZE[t->x.type] / SIM_BYTES_PER_S + 4 / SIM_MACS_PER_S));
    return SIM_OK;
}

static uint8_t e4m3_of(float x, int cut) { /* nearest, ties to even; saturates; NaN stays NaN */
    uint32_t u = bits_of(x), sign = u >> 24 & 0x80, magnitude = u & 0x7FFFFFFF;
    if (x != x) return sign | 0x7F;
    float size = float_of(magnitude);
    if (size >= LARGEST_E4M3) return sign | 0x7E;
    if (size < 0x1p-6f) return sign | (uint8_t)(cut ? floorf(size * 0x1p9f) : nearbyintf(size * 0x1p9f));
    magnitude += cut ? 0 : 0x7FFFF + (magnitude >> 20 & 1);
    return sign | (uint8_t)((magnitude >> 20) - ((127 - 7) << 3));
}

static uint8_t exponent_up(float s) { /* of the next power of two, the field kept in 1..254 */
    uint32_t u = bits_of(s), e = (u >> 23 & 0xFF) + ((u & 0x7FFFFF) != 0);
    return e < 1 ? 1 : e > 254 ? 254 : e;
}

static int run_cast(sim_device *dev, const sim_cast_args *q) {
    int groups = over(q->n, q->group), cut = is(dev, "cast_truncate");
    int code = reaches(dev, &q->x, q->m, q->n);
    if (!code) code = reaches(dev, &q->codes, q->m, q->n);
    if (!code) code = reaches(dev, &q->scales, q->m, q->scale == 2 ? over(groups, 4) : groups);
    if (code) return code;
    for (int r = 0; r < q->m; r++) {
        float before = 0;
        for (int g = 0; g < groups; g++) {
            int first = g * q->group, last = least(first + q->group, q->n);
            float amax = 1e-4f;
            for (int c = first; c < last; c++) {
                float x = fabsf(load(at(dev, &q->x, r, c), q->x.type));
                if (x > amax || x != x) amax = x; /* a NaN stays: nothing is larger */
            }
            float scale = amax / LARGEST_E4M3;
            if (g && first % TILE_CAST == 0 && is(dev, "cast_stale_scale")) scale = before;
            before = scale;
            uint8_t exponent = exponent_up(scale);
            if (q->scale) scale = float_of((uint32_t)exponent << 23);
            if (q->scale == 2) at(dev, &q->scales, r, g / 4)[g % 4] = exponent;
            else store(at(dev, &q->scales, r, g), SIM_F32, scale, 0);
            float factor = 1.0f / scale;
            for (int c = first; c < last; c++)
                *at(dev, &q->codes, r, c) = e4m3_of(load(at(dev, &q->x, r, c), q->x.type) * factor, cut);
        }
        for (int g = groups; q->scale == 2 && g % 4; g++) at(dev, &q->scales, r, g / 4)[g % 4] = ONE_AS_EXPONENT;
    }
    work(dev, SIM_LAUNCH_S + (double)q->m * q->n * ((SIZE[q->x.type] + 1) / SIM_BYTES_PER_S + 2 / SIM_MACS_PER_S));
    return SIM_OK;
}
