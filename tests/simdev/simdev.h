/* simdev: runtime of a simulated accelerator. C ABI, no C++; link with libsimdev.so.
 *
 * The device. Eight of them, 64 MiB of memory each, in an address space of its own: memory is named by handles and
 * moved by DMA. Types: float (IEEE, subnormals kept), bfloat16, int32, and bytes. There is no int64 and no FP8
 * arithmetic: an E4M3 number is a byte. Matrix unit: tiles of 96 x 160 x 48 (m, n, k), float accumulators.
 * Vector unit: tiles of 96 rows x 384 columns, or 768 columns of one row.
 *
 * Rules.
 *  - One process a device. sim_open by a second one gives SIM_E_BUSY as long as the first one lives.
 *  - Launches are asynchronous. Nothing runs before sim_synchronize, or before the queue is full (64). What a launch
 *    names must stay allocated until then. An error of a launch is told by sim_synchronize.
 *  - DMA (sim_write, sim_read) is another engine: it moves bytes at once and waits for no launch.
 *  - Allocations start at multiples of 512 bytes. DMA offsets are multiples of 512; lengths are free.
 *  - Every block has 512 watched bytes in front and 512 behind; sim_synchronize and sim_free say SIM_E_DAMAGE once if
 *    one changed, and mend it.
 *  - SIM_E_TRAP and SIM_E_FAULT stay until the process closes the device. SIM_E_LOST stays, whatever process asks,
 *    until sim_reset, which takes 20 s. A device that hangs is lost.
 *  - One thread a device handle. A handle does not survive fork().
 *
 * Time is simulated: SIM_LAUNCH_S a launch, DMA and arithmetic by their size, times sim_slow. Where the environment
 * variable CONFORMANCE_FAKE_CLOCK names a file, every simulated second is added to the double at its start.
 */
#ifndef SIMDEV_H
#define SIMDEV_H
#include <stdint.h>

#define SIM_DEVICES 8
#define SIM_MEMORY_BYTES (64u << 20)
#define SIM_ALIGN_BYTES 512
#define SIM_RESET_S 20.0
#define SIM_LAUNCH_S 2e-6
#define SIM_BYTES_PER_S 5e10
#define SIM_MACS_PER_S 1e12

enum {
    SIM_OK = 0,
    SIM_E_ARGUMENT = 1, /* a value the call does not take; nothing was done */
    SIM_E_HANDLE = 2,   /* no such memory, or freed before the launch ran */
    SIM_E_MEMORY = 3,   /* no free block of that size */
    SIM_E_BUSY = 4,     /* another process has the device */
    SIM_E_RANGE = 5,    /* DMA outside of a block, or its offset is no multiple of 512 */
    SIM_E_SYSTEM = 6,   /* the host refused a file or memory */
    SIM_E_DAMAGE = 7,   /* a launch wrote outside of a block */
    SIM_E_KERNEL = 8,   /* a launch was refused by its kernel; the next one may run */
    SIM_E_FAULT = 100,  /* a launch reached outside of device memory; until sim_close */
    SIM_E_TRAP = 101,   /* a launch found a NaN it was told to stop at; until sim_close */
    SIM_E_LOST = 200    /* the device does not answer; until sim_reset */
};

enum { SIM_BYTE = 0, SIM_BF16 = 1, SIM_F32 = 2, SIM_I32 = 3 };

typedef struct sim_device sim_device;
typedef uint64_t sim_mem; /* 0 is no memory */

/* A matrix in a block: `offset` in bytes, a multiple of the type's size; strides in elements, 0 to repeat. */
typedef struct {
    sim_mem mem;
    uint64_t offset;
    int64_t row_stride, column_stride;
    int32_t type, reserved;
} sim_matrix;

/* d[m,n] = alpha * sum over k of a[m,k] b[n,k] (+ c[m,n]), rounded once. a, b: BF16. d: BF16 or F32. c: as d, may be d
 * itself; c.mem = 0 for none. k = 0 gives c, or zeros. */
typedef struct {
    sim_matrix a, b, c, d;
    int32_t m, n, k;
    float alpha;
} sim_gemm_args;

/* The k largest of the first `end` columns of each row (all of them where end.mem = 0); which of equals is free; -0
 * equals 0. x: BF16 or F32, column_stride 1. indices: I32 [rows, k], plus offsets[row] if offsets.mem. values: as x
 * [rows, k], or mem = 0. order: 0 index, 1 value (descending). Rows with end <= k hold all of their columns, by
 * index for order 0, then the fills. A NaN in a longer row: trap_nan 1 SIM_E_TRAP, 0 puts 0x3f3f3f3f in its first
 * index. end, offsets: I32 [rows], side by side. */
typedef struct {
    sim_matrix x, values, indices, end, offsets;
    int32_t rows, columns, k, order, index_fill, trap_nan;
    float value_fill;
} sim_topk_args;

/* E4M3 codes of x[m,n], one scale for each `group` columns of a row: s = max(largest magnitude, 1e-4) / 448; code =
 * E4M3(x * (1 / s)), saturating. x: BF16 or F32. codes: BYTE. scale: 0 F32; 1 F32 rounded up to a power of two; 2 the
 * exponents of these as bytes, four a column of I32 from the lowest on, 127 behind the last. */
typedef struct {
    sim_matrix x, codes, scales;
    int32_t m, n, group, scale;
} sim_cast_args;

int sim_open(const char *state_dir, int index, sim_device **out); /* state_dir: where devices live; made if missing */
int sim_close(sim_device *dev);
int sim_status(sim_device *dev); /* SIM_OK, or the error that stays */
int sim_reset(sim_device *dev);  /* SIM_OK with all memory freed, or SIM_E_LOST if that did not help */
int sim_alloc(sim_device *dev, uint64_t nbytes, sim_mem *out);
int sim_free(sim_device *dev, sim_mem mem);
int sim_memory(sim_device *dev, uint64_t *free_bytes, uint64_t *total_bytes);
int sim_fill(sim_device *dev, int byte); /* what memory holds when given out; -1: what was there */
int sim_write(sim_device *dev, sim_mem mem, uint64_t offset, const void *from, uint64_t nbytes);
int sim_read(sim_device *dev, sim_mem mem, uint64_t offset, void *to, uint64_t nbytes);
int sim_gemm(sim_device *dev, const sim_gemm_args *args);
int sim_topk(sim_device *dev, const sim_topk_args *args);
int sim_cast(sim_device *dev, const sim_cast_args *args);
int sim_synchronize(sim_device *dev);
int sim_seconds(sim_device *dev, double *busy); /* simulated seconds of launches since sim_open */

/* For tests of whoever drives a device: what goes wrong in it, and how slow it is. */
int sim_slow(sim_device *dev, double factor);
int sim_plant(sim_device *dev, const char *defect, int argument); /* argument 0: the defect's own default */
const char *sim_defect(int i, const char **text);                 /* name and meaning of the i-th, NULL behind the last */

#endif
