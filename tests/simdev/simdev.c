/* The simulated accelerator of simdev.h. Kernels are in kernels.h; defects are planted by name. */
#define _GNU_SOURCE
#include "simdev.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define BLOCKS 1024
#define QUEUE 64
#define ZONE SIM_ALIGN_BYTES
#define ZONE_BYTE 0xDB
#define LATE_US 50000

enum { GEMM, TOPK, CAST };

typedef struct { /* what outlives a process: the start of the device's file */
    uint64_t lost, deaths, resets, opens, launches, fired;
} chip_t;

typedef struct {
    uint64_t nbytes, address; /* of the data; the zones stand around it */
    uint32_t generation, users, born;
} block_t;

typedef struct {
    int kind;
    union { sim_gemm_args gemm; sim_topk_args topk; sim_cast_args cast; };
} launch_t;

struct sim_device {
    int fd, error, fill, defect, argument, queued, late_to_come;
    uint32_t launches;
    double slow, busy;
    chip_t *chip;
    uint8_t *memory;
    double *clock;
    block_t blocks[BLOCKS];
    launch_t queue[QUEUE];
    pthread_mutex_t lock;
    uint8_t *late_at, late_bytes[8];
    int late_n;
};

typedef struct { const char *name, *text; int argument; } defect_t;
static const defect_t DEFECTS[] = {
    {"", "none", 0},
    {"reverse_k", "no defect: tiles of k are added from the last to the first", 0},
    {"eager", "no defect: launches run at once", 0},
    {"drop_k_tail", "gemm: a second or later tile of k that is not full is left out", 0},
    {"second_k_twice", "gemm: the second tile of k counts twice", 0},
    {"dirty_k_tail", "gemm: what lies behind k in its last tile is from the tile before", 0},
    {"swap_columns", "gemm: from the second tile of n on, the first two columns of a tile are swapped", 0},
    {"stale_a", "gemm: from the second tile of m on, the second tile of k uses A of the first", 0},
    {"stale_b", "gemm: from the second tile of n on, the second tile of k uses B of the first", 0},
    {"keep_sums", "gemm: from the second tile of n on, sums start from the tile before", 0},
    {"drop_m_tail", "gemm: a second or later tile of m that is not full is not stored", 0},
    {"drop_n_tail", "gemm: a second or later tile of n that is not full is not stored", 0},
    {"short_m_tail", "gemm: of a second or later tile of m the last row is not stored", 0},
    {"truncate", "gemm: BF16 results are cut, not rounded", 0},
    {"topk_drop_tail", "topk: a second or later tile of columns that is not full is not looked at", 0},
    {"topk_border_twice", "topk: the last column of the first tile is seen again as the first of the second", 0},
    {"topk_fill", "topk: the fill of indices is one too low", 0},
    {"cast_stale_scale", "cast: the first group of a second tile of columns has the scale of the group before", 0},
    {"cast_truncate", "cast: codes are cut, not rounded", 0},
    {"ignore_stride", "rows of the (first) input are taken to follow each other without gaps", 0},
    {"packed_output", "rows of the output are stored without gaps", 0},
    {"behind", "writes the four bytes behind the output", 0},
    {"before", "writes the four bytes in front of the output", 0},
    {"far_behind", "writes behind the block of the output", 0},
    {"unwritten", "the last element of the output is not stored", 0},
    {"late_write", "the last element of the output is stored 50 ms after synchronize came back", 0},
    {"not_waiting", "synchronize comes back 50 ms before the launches run", 0},
    {"mutate_input", "flips a bit of the (first) input", 0},
    {"first_call", "the first launch of a process has one wrong element", 0},
    {"once", "one launch in the life of the device has one wrong element", 0},
    {"refuse", "every launch gives SIM_E_KERNEL", 0},
    {"fault", "every launch gives SIM_E_FAULT", 0},
    {"segfault", "a launch of at least so many tiles, if that is more than one, and more than one of k, is a SIGSEGV", 1},
    {"hang", "a launch of at least so many tiles never ends, and the device is lost", 1},
    {"dies", "a launch of at least so many tiles along m (of columns), and more than one of k, loses the device", 2},
    {"stays_lost", "as dies, from one tile on, and resets do not help", 1},
    {"leak", "the first launch keeps all memory that is free", 0},
    {"shared_block", "a block that is in use since before the last launch is given out again", 0},
};
#define N_DEFECTS ((int)(sizeof DEFECTS / sizeof *DEFECTS))
static int is(const sim_device *dev, const char *name) { return !strcmp(DEFECTS[dev->defect].name, name); }

static void pass(sim_device *dev, double seconds) { /* simulated time goes by */
    if (!dev->clock) return;
    uint64_t old, next, *at = (uint64_t *)dev->clock;
    __atomic_load(at, &old, __ATOMIC_SEQ_CST);
    do {
        double now;
        memcpy(&now, &old, 8);
        now += seconds;
        memcpy(&next, &now, 8);
    } while (!__atomic_compare_exchange(at, &old, &next, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
}

static void work(sim_device *dev, double seconds) {
    dev->busy += seconds * dev->slow;
    pass(dev, seconds * dev->slow);
}

static void lose(sim_device *dev) {
    dev->chip->lost = 1;
    dev->chip->deaths++;
}

static int standing(const sim_device *dev) { return dev->chip->lost ? SIM_E_LOST : dev->error; }

/* Memory */
static block_t *find(sim_device *dev, sim_mem mem) {
    block_t *b = &dev->blocks[(mem >> 8) % BLOCKS];
    return mem && b->users && mem == (((uint64_t)b->generation << 32) | ((uint64_t)(b - dev->blocks) << 8) | 0x5D) ? b : NULL;
}

static uint64_t slot_bytes(uint64_t nbytes) { return (nbytes + ZONE - 1) / ZONE * ZONE + 2 * ZONE; }

static void zones(sim_device *dev, const block_t *b) {
    uint8_t *data = dev->memory + b->address;
    memset(data - ZONE, ZONE_BYTE, ZONE);
    memset(data + b->nbytes, ZONE_BYTE, slot_bytes(b->nbytes) - ZONE - b->nbytes);
}

static int damaged(sim_device *dev, const block_t *b) {
    const uint8_t *data = dev->memory + b->address;
    uint64_t rear = slot_bytes(b->nbytes) - ZONE - b->nbytes;
    for (int i = 1; i <= ZONE; i++) if (data[-i] != ZONE_BYTE) return 1;
    for (uint64_t i = 0; i < rear; i++) if (data[b->nbytes + i] != ZONE_BYTE) return 1;
    return 0;
}

static int place(sim_device *dev, uint64_t nbytes, uint64_t *slot) { /* first gap that is large enough */
    uint64_t size = slot_bytes(nbytes), at = 0;
    for (int i = 0, moved = 1; moved;) {
        for (i = moved = 0; i < BLOCKS; i++) {
            block_t *b = &dev->blocks[i];
            uint64_t lo = b->address - ZONE, hi = lo + slot_bytes(b->nbytes);
            if (b->users && at < hi && lo < at + size) at = hi, moved = 1;
        }
    }
    *slot = at;
    return at + size <= SIM_MEMORY_BYTES;
}

static int give(sim_device *dev, uint64_t nbytes, sim_mem *out) {
    uint64_t slot;
    int i = 0;
    if (nbytes > SIM_MEMORY_BYTES || !place(dev, nbytes, &slot)) return SIM_E_MEMORY;
    if (is(dev, "shared_block"))
        for (int j = 0; j < BLOCKS; j++) {
            block_t *b = &dev->blocks[j];
            if (b->users && b->nbytes == nbytes && b->born < dev->launches) {
                b->users++;
                *out = ((uint64_t)b->generation << 32) | ((uint64_t)j << 8) | 0x5D;
                return SIM_OK;
            }
        }
    while (i < BLOCKS && dev->blocks[i].users) i++;
    if (i == BLOCKS) return SIM_E_MEMORY;
    block_t *b = &dev->blocks[i];
    *b = (block_t){nbytes, slot + ZONE, b->generation + 1, 1, dev->launches};
    if (dev->fill >= 0) memset(dev->memory + b->address, dev->fill, nbytes);
    zones(dev, b);
    *out = ((uint64_t)b->generation << 32) | ((uint64_t)i << 8) | 0x5D;
    return SIM_OK;
}

#include "kernels.h"

/* The queue */
static void *late_element(void *arg) {
    sim_device *dev = arg;
    usleep(LATE_US);
    memcpy(dev->late_at, dev->late_bytes, dev->late_n);
    return NULL;
}

static int in_thread(sim_device *dev, void *(*f)(void *)) {
    pthread_t thread;
    return pthread_create(&thread, NULL, f, dev) || pthread_detach(thread) ? SIM_E_SYSTEM : SIM_OK;
}

static int run_one(sim_device *dev, launch_t *l) {
    sim_matrix *in = l->kind == GEMM ? &l->gemm.a : l->kind == TOPK ? &l->topk.x : &l->cast.x;
    sim_matrix *out = l->kind == GEMM ? &l->gemm.d : l->kind == TOPK ? &l->topk.indices : &l->cast.codes;
    int rows = l->kind == GEMM ? l->gemm.m : l->kind == TOPK ? l->topk.rows : l->cast.m;
    int columns = l->kind == GEMM ? l->gemm.n : l->kind == TOPK ? l->topk.k : l->cast.n;
    int inner = l->kind == GEMM ? l->gemm.k : l->kind == TOPK ? l->topk.columns : l->cast.n;
    int tiles = l->kind == GEMM ? over(rows, TILE_M) : over(inner, l->kind == TOPK ? TILE_TOPK : TILE_CAST);
    int many = tiles >= dev->argument, deep = l->kind != GEMM || inner > TILE_K, first = dev->launches == 0;
    dev->launches++;
    dev->chip->launches++;
    if (is(dev, "segfault") && many && (deep || dev->argument == 1)) raise(SIGSEGV);
    if (is(dev, "refuse")) return SIM_E_KERNEL;
    if (is(dev, "fault")) return dev->error = SIM_E_FAULT;
    if ((is(dev, "dies") && many && deep) || is(dev, "stays_lost")) return lose(dev), SIM_E_LOST;
    if (is(dev, "hang") && many) { /* other threads get their errors */
        lose(dev);
        pthread_mutex_unlock(&dev->lock);
        for (;; usleep(1000)) pass(dev, 0.02);
    }
    if (is(dev, "leak") && first) for (uint64_t n = SIM_MEMORY_BYTES, mem; n; give(dev, n, &mem) ? n /= 2 : 0);
    if (is(dev, "ignore_stride") && in->column_stride == 1) in->row_stride = inner;
    if (is(dev, "packed_output") && out->column_stride == 1) out->row_stride = columns;
    int code = reaches(dev, out, rows, columns);
    if (!code) code = reaches(dev, in, 1, 1);
    if (code) return code >= SIM_E_FAULT ? dev->error = code : code;
    uint8_t *x = at(dev, in, 0, 0), *y = at(dev, out, 0, 0), *last = at(dev, out, rows - 1, columns - 1);
    int n = SIZE[out->type], cut = is(dev, "unwritten") || is(dev, "late_write");
    memcpy(dev->late_bytes, last, n);
    code = l->kind == GEMM ? run_gemm(dev, &l->gemm) : l->kind == TOPK ? run_topk(dev, &l->topk) : run_cast(dev, &l->cast);
    if (code) return code >= SIM_E_FAULT ? dev->error = code : code;
    if (cut) for (int i = 0; i < n; i++) { uint8_t t = last[i]; last[i] = dev->late_bytes[i]; dev->late_bytes[i] = t; }
    dev->late_at = last, dev->late_n = n;
    if (is(dev, "late_write") && in_thread(dev, late_element)) return SIM_E_SYSTEM;
    if (is(dev, "behind")) memset(last + n, 0x33, 4);
    if (is(dev, "before")) memset(y - 4, 0x33, 4);
    block_t *b = find(dev, out->mem);
    if (is(dev, "far_behind")) memset(dev->memory + b->address + b->nbytes, 0x33, 4);
    if (is(dev, "mutate_input")) *x ^= 1;
    if ((is(dev, "first_call") && first) || (is(dev, "once") && !dev->chip->fired++)) y[n - 1] ^= 0x70;
    return SIM_OK;
}

static int run_all(sim_device *dev) {
    int code = standing(dev);
    for (int i = 0; i < dev->queued; i++) {
        int one = code >= SIM_E_FAULT ? code : run_one(dev, &dev->queue[i]);
        if (one > code) code = one;
    }
    dev->queued = 0;
    for (int i = 0; i < BLOCKS; i++)
        if (dev->blocks[i].users && damaged(dev, &dev->blocks[i])) {
            zones(dev, &dev->blocks[i]);
            if (!code) code = SIM_E_DAMAGE;
        }
    return code;
}

static void *late_queue(void *arg) {
    sim_device *dev = arg;
    usleep(LATE_US);
    pthread_mutex_lock(&dev->lock);
    run_all(dev);
    dev->late_to_come = 0;
    pthread_mutex_unlock(&dev->lock);
    return NULL;
}

static int push(sim_device *dev, launch_t *l) {
    pthread_mutex_lock(&dev->lock);
    int code = standing(dev);
    if (!code && dev->queued == QUEUE) code = run_all(dev);
    if (!code) dev->queue[dev->queued++] = *l;
    if (!code && is(dev, "eager")) code = run_all(dev);
    pthread_mutex_unlock(&dev->lock);
    return code;
}

int sim_synchronize(sim_device *dev) {
    int code = SIM_OK;
    pthread_mutex_lock(&dev->lock);
    if (!is(dev, "not_waiting")) code = run_all(dev);
    else if (dev->queued && !dev->late_to_come++) code = in_thread(dev, late_queue);
    pthread_mutex_unlock(&dev->lock);
    return code;
}

int sim_gemm(sim_device *dev, const sim_gemm_args *a) {
    if (a->m < 1 || a->n < 1 || a->k < 0 || a->a.type != SIM_BF16 || a->b.type != SIM_BF16) return SIM_E_ARGUMENT;
    if ((a->d.type != SIM_BF16 && a->d.type != SIM_F32) || (a->c.mem && a->c.type != a->d.type)) return SIM_E_ARGUMENT;
    launch_t l = {.kind = GEMM, .gemm = *a};
    return push(dev, &l);
}

int sim_topk(sim_device *dev, const sim_topk_args *a) {
    if (a->rows < 1 || a->k < 1 || a->columns < 1 || a->indices.type != SIM_I32) return SIM_E_ARGUMENT;
    if ((a->x.type != SIM_BF16 && a->x.type != SIM_F32) || a->x.column_stride != 1) return SIM_E_ARGUMENT;
    if (a->values.mem && a->values.type != a->x.type) return SIM_E_ARGUMENT;
    launch_t l = {.kind = TOPK, .topk = *a};
    return push(dev, &l);
}

int sim_cast(sim_device *dev, const sim_cast_args *a) {
    if (a->m < 1 || a->n < 1 || a->group < 1 || a->scale < 0 || a->scale > 2) return SIM_E_ARGUMENT;
    if ((a->x.type != SIM_BF16 && a->x.type != SIM_F32) || a->codes.type != SIM_BYTE) return SIM_E_ARGUMENT;
    if (a->scales.type != (a->scale == 2 ? SIM_I32 : SIM_F32)) return SIM_E_ARGUMENT;
    launch_t l = {.kind = CAST, .cast = *a};
    return push(dev, &l);
}

/* Blocks and DMA, in the calling thread */
#define LOCKED(dev, expression) \
    do { \
        pthread_mutex_lock(&(dev)->lock); \
        int code_ = standing(dev); \
        if (!code_) code_ = (expression); \
        pthread_mutex_unlock(&(dev)->lock); \
        return code_; \
    } while (0)

static int take(sim_device *dev, sim_mem mem) {
    block_t *b = find(dev, mem);
    if (!b) return SIM_E_HANDLE;
    int code = damaged(dev, b) ? SIM_E_DAMAGE : SIM_OK;
    b->users--;
    return code;
}

static int dma(sim_device *dev, sim_mem mem, uint64_t offset, void *host, uint64_t nbytes, int in) {
    block_t *b = find(dev, mem);
    if (!b) return SIM_E_HANDLE;
    if (offset % SIM_ALIGN_BYTES || offset > b->nbytes || nbytes > b->nbytes - offset) return SIM_E_RANGE;
    uint8_t *there = dev->memory + b->address + offset;
    memcpy(in ? (void *)there : host, in ? host : (void *)there, nbytes);
    pass(dev, (SIM_LAUNCH_S + nbytes / SIM_BYTES_PER_S) * dev->slow);
    return SIM_OK;
}

int sim_alloc(sim_device *dev, uint64_t nbytes, sim_mem *out) { LOCKED(dev, give(dev, nbytes, out)); }
int sim_free(sim_device *dev, sim_mem mem) { LOCKED(dev, take(dev, mem)); }
int sim_write(sim_device *dev, sim_mem mem, uint64_t offset, const void *from, uint64_t nbytes) {
    LOCKED(dev, dma(dev, mem, offset, (void *)from, nbytes, 1));
}
int sim_read(sim_device *dev, sim_mem mem, uint64_t offset, void *to, uint64_t nbytes) {
    LOCKED(dev, dma(dev, mem, offset, to, nbytes, 0));
}

int sim_memory(sim_device *dev, uint64_t *free_bytes, uint64_t *total_bytes) {
    *free_bytes = *total_bytes = SIM_MEMORY_BYTES;
    for (int i = 0; i < BLOCKS; i++) if (dev->blocks[i].users) *free_bytes -= slot_bytes(dev->blocks[i].nbytes);
    return standing(dev);
}

int sim_fill(sim_device *dev, int byte) { return byte < -1 || byte > 255 ? SIM_E_ARGUMENT : (dev->fill = byte, SIM_OK); }
int sim_slow(sim_device *dev, double f) { return f > 0 ? (dev->slow = f, SIM_OK) : SIM_E_ARGUMENT; }
int sim_seconds(sim_device *dev, double *busy) { return *busy = dev->busy, SIM_OK; }
int sim_status(sim_device *dev) { return standing(dev); }

int sim_plant(sim_device *dev, const char *defect, int argument) {
    for (int i = 0; i < N_DEFECTS; i++)
        if (!strcmp(DEFECTS[i].name, defect)) {
            dev->argument = argument ? argument : DEFECTS[i].argument;
            return dev->defect = i, SIM_OK;
        }
    return SIM_E_ARGUMENT;
}

const char *sim_defect(int i, const char **text) {
    if (i < 0 || i >= N_DEFECTS) return NULL;
    *text = DEFECTS[i].text;
    return DEFECTS[i].name;
}

/* Life */
static void *mapped(int fd, size_t nbytes) {
    void *p = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return p == MAP_FAILED ? NULL : p;
}

int sim_open(const char *state_dir, int index, sim_device **out) {
    char path[4096];
    if (index < 0 || index >= SIM_DEVICES || !state_dir) return SIM_E_ARGUMENT;
    if (snprintf(path, sizeof path, "%s/device%d", state_dir, index) >= (int)sizeof path) return SIM_E_ARGUMENT;
    if (mkdir(state_dir, 0700) && errno != EEXIST) return SIM_E_SYSTEM;
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) return SIM_E_SYSTEM;
    if (flock(fd, LOCK_EX | LOCK_NB)) return close(fd), SIM_E_BUSY;
    sim_device *dev = calloc(1, sizeof *dev);
    if (!dev || ftruncate(fd, sizeof(chip_t)) || !(dev->chip = mapped(fd, sizeof(chip_t)))) return close(fd), SIM_E_SYSTEM;
    dev->memory = mmap(NULL, SIM_MEMORY_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (dev->memory == MAP_FAILED) return close(fd), SIM_E_SYSTEM;
    dev->fd = fd, dev->fill = -1, dev->slow = 1;
    pthread_mutex_init(&dev->lock, NULL);
    const char *clock = getenv("CONFORMANCE_FAKE_CLOCK");
    int file = clock && *clock ? open(clock, O_RDWR | O_CLOEXEC) : -1;
    if (file >= 0) dev->clock = mapped(file, 8), close(file);
    dev->chip->opens++;
    return *out = dev, SIM_OK;
}

int sim_reset(sim_device *dev) {
    pthread_mutex_lock(&dev->lock);
    pass(dev, SIM_RESET_S);
    dev->chip->resets++;
    dev->error = dev->queued = 0;
    if (!is(dev, "stays_lost")) dev->chip->lost = 0;
    for (int i = 0; i < BLOCKS; i++) dev->blocks[i].users = 0;
    pthread_mutex_unlock(&dev->lock);
    return standing(dev);
}

int sim_close(sim_device *dev) { /* the handle stays: a late launch may name it; so does the mapping, which holds the lock */
    pthread_mutex_lock(&dev->lock);
    int code = flock(dev->fd, LOCK_UN) || close(dev->fd) ? SIM_E_SYSTEM : SIM_OK;
    dev->error = SIM_E_FAULT;
    pthread_mutex_unlock(&dev->lock);
    return code;
}
