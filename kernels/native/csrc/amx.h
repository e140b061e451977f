/* The tile instructions. The compilers' own wrappers do not say, or not all of them, which memory they read, so that
 * stores to it may be moved behind them or dropped; these do. Tile numbers are literals. */
#ifndef BATON_AMX_H
#define BATON_AMX_H

#include <stdint.h>

struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t num_rows[16];
};

#define TILE_CONFIGURE(config) __asm__ volatile("ldtilecfg %0" ::"m"(config))
#define TILE_RELEASE() __asm__ volatile("tilerelease")
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
#define TILE_LOAD(tile, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((int64_t)(stride)) : "memory")
/* Of what is read once while other things are to stay in the nearest cache. */
#define TILE_LOAD_PASSING(tile, from, stride) \
    __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((int64_t)(stride)) : "memory")
#define TILE_STORE(tile, to, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((int64_t)(stride)) : "memory")
/* sums += left x right, of bf16 */
#define TILE_MULTIPLY(sums, left, right) \
    __asm__ volatile("tdpbf16ps %%tmm" #right ", %%tmm" #left ", %%tmm" #sums ::)

#endif
