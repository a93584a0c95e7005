/* What the compiled passes of every package begin with: each kernels.c includes it once. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#if !defined(__GNUC__)
#error "made for gcc or clang"
#endif

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__)
#define FAST __attribute__((target_clones("avx2", "default")))
#else
#define FAST
#endif

/* What setup.py found in both files, so that a library is left alone that was built from others. */
#ifndef TW_SOURCE
#define TW_SOURCE 0
#endif
int64_t tw_source(void) { return TW_SOURCE; }

enum { LOOK = 64 }; /* elements that are looked at together: a bit of one number for each */

/* Where bits are set, from base on; room for 4 more than there are. How many there are cannot be foreseen, and
   a branch for each would be mispredicted at most blocks, so four are written at a time. */
static inline size_t listed(uint64_t bits, size_t base, uint16_t *at)
{
    const size_t count = (size_t)__builtin_popcountll(bits);
    for (size_t j = 0; j < count; j += 4)
        for (size_t k = j; k < j + 4; k++) {
            at[k] = (uint16_t)(base + (size_t)__builtin_ctzll(bits | UINT64_C(1) << 63));
            bits &= bits - 1;
        }
    return count;
}
