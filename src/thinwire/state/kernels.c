/* The passes over all words of a state, and over all that changed, each in one go; native.py calls them.

   Where no compiler was at hand, numpy does the same in several passes. Words are compared as bits, so they are
   unsigned here. To find the few elements of 64 that matter, a loop that compilers turn into vector code flags
   them, and the flags are packed into one number whose bits are then taken one by one.

   Nothing here checks its arguments: native.py does. */

#include "passes.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__ || __SIZEOF_POINTER__ != 8
#error "made for machines of 64 bits that store the lowest byte first"
#endif

enum { CHUNK = 4096, ROW_BITS = 12, MOST = 16 };

/* Classes, and factors of the content hash that repeat: native.py takes no library that says otherwise. */
int64_t tw_most(void) { return MOST; }
int64_t tw_row(void) { return 1 << ROW_BITS; }

/* One bit a flag, of LOOK flags that are 0 or 1. */
static inline uint64_t packed(const uint8_t *flags)
{
    uint64_t bits = 0;
#ifdef __SSE2__
    for (size_t g = 0; g < LOOK / 16; g++) {
        __m128i some = _mm_loadu_si128((const __m128i *)(flags + 16 * g));
        bits |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_slli_epi16(some, 7)) << 16 * g;
    }
#else
    for (size_t g = 0; g < LOOK / 8; g++) {
        uint64_t some;
        memcpy(&some, flags + 8 * g, 8);
        bits |= (some * UINT64_C(0x0102040810204080) >> 56) << 8 * g;
    }
#endif
    return bits;
}

/* The same bits with each byte's in the other order. */
static inline uint64_t highest_first(uint64_t bits)
{
    bits = (bits >> 1 & UINT64_C(0x5555555555555555)) | (bits & UINT64_C(0x5555555555555555)) << 1;
    bits = (bits >> 2 & UINT64_C(0x3333333333333333)) | (bits & UINT64_C(0x3333333333333333)) << 2;
    return (bits >> 4 & UINT64_C(0x0f0f0f0f0f0f0f0f)) | (bits & UINT64_C(0x0f0f0f0f0f0f0f0f)) << 4;
}

/* Run BODY with p at each element of 0..n - 1 for which FLAG, an expression of p, holds. */
#define EACH(n, FLAG, BODY)                                                                         \
    for (size_t i = 0; i < (n); i += CHUNK) {                                                       \
        uint16_t found_at[CHUNK + 4];                                                               \
        const size_t chunk = (n) - i < CHUNK ? (n) - i : CHUNK;                                      \
        size_t found_here = 0;                                                                      \
        for (size_t base = 0; base < chunk; base += LOOK) {                                          \
            uint8_t flags[LOOK];                                                                    \
            FLAGS(i + base, n, FLAG)                                                                \
            found_here += listed(packed(flags), base, found_at + found_here);                       \
        }                                                                                           \
        for (size_t j = 0; j < found_here; j++) {                                                   \
            const size_t p = i + found_at[j];                                                       \
            BODY                                                                                    \
        }                                                                                           \
    }

/* Write the first of 64 bits, at most as many as are left, as numpy packs them. */
static inline void write_bits(uint8_t *to, uint64_t bits, size_t left)
{
    bits = highest_first(bits);
    memcpy(to, &bits, left < LOOK ? (left + 7) / 8 : LOOK / 8);
}

/* Set flags[0..LOOK - 1] to FLAG, an expression of p, for p from i on, and to 0 from n on. */
#define FLAGS(i, n, FLAG)                                                                           \
    if ((n) - (i) >= LOOK) {                                                                        \
        for (size_t j = 0; j < LOOK; j++) { const size_t p = (i) + j; flags[j] = (FLAG); }          \
    } else {                                                                                        \
        memset(flags, 0, LOOK);                                                                     \
        for (size_t p = (i); p < (n); p++) flags[p - (i)] = (FLAG);                                 \
    }

/* For elements 0..n - 1 tell by a bit for which FLAG, an expression of p, holds, and list VALUE of these: where
   they are many. All values are written, each over the one before where that does not count. */
#define EVERY(W, n, FLAG, VALUE)                                                                    \
    for (size_t i = 0; i < (n); i += LOOK) {                                                        \
        uint8_t flags[LOOK];                                                                        \
        W last[LOOK];                                                                               \
        FLAGS(i, n, FLAG)                                                                           \
        const uint64_t set = packed(flags);                                                         \
        const size_t here = (n) - i < LOOK ? (n) - i : LOOK, count = (size_t)__builtin_popcountll(set);\
        if (count > room - found) return -1;                                                        \
        write_bits(bits + i / 8, set, here);                                                        \
        W *to = room - found < LOOK ? last : out + found;                                           \
        size_t k = 0;                                                                               \
        for (size_t j = 0; j < here; j++) { const size_t p = i + j; to[k] = VALUE; k += flags[j]; } \
        if (to == last) memcpy(out + found, last, count * sizeof(W));                               \
        found += count;                                                                             \
    }

#define BEYOND(W, difference) ((W)((difference) + 1) > 2)
#define NEGATIVE(W, SIGNED, difference) ((W)((SIGNED)(difference) >> (8 * sizeof(W) - 1)))  /* all bits, or none */
#define SIZE(W, SIGNED, difference) \
    (W)(((difference) ^ NEGATIVE(W, SIGNED, difference)) - NEGATIVE(W, SIGNED, difference))

/* What is listed has room for as many as were counted before; memory that others write to may hold more by then,
   and where it does -1 comes back. */
#define ROOM if (found == room) return -1;

/* Where a mask is set, and at how many elements. */
FAST int64_t tw_where(const uint8_t *mask, size_t n, int64_t *at, size_t room)
{
    size_t found = 0;
    EACH(n, mask[p] != 0, ROOM at[found++] = (int64_t)p;)
    return (int64_t)found;
}

/* Whether all positions are of an array of size elements. */
FAST int64_t tw_within(const int32_t *at, size_t n, size_t size)
{
    uint32_t most = 0;
    for (size_t j = 0; j < n; j++) most = (uint32_t)at[j] > most ? (uint32_t)at[j] : most;
    return !n || most < size;
}

/* Set the bits of positions, of which there is none set yet. */
FAST int64_t tw_bits(const int32_t *at, size_t n, uint8_t *bits)
{
    for (size_t j = 0; j < n; j++) bits[(uint32_t)at[j] >> 3] |= (uint8_t)(128 >> (at[j] & 7));
    return 0;
}

/* Numbers as symbols and low bits, page by page, see patch_stream.py: a symbol is the exponent and the three bits
   after the leading one of u + 8, and what is below these are low bits, as wide codes of codecs/kernels/bits.py. */
enum { PAGE = 1 << 17, WIDTHS = 29 };

static inline unsigned symbol_of(uint32_t more)
{
    const unsigned width = 28 - (unsigned)__builtin_clz(more);
    return width << 3 | (more >> width & 7);
}

/* How many numbers of a page have low bits of each width, and the bytes of all these. */
static size_t counted(const uint8_t *symbols, size_t n, size_t *counts)
{
    size_t total = 0;
    memset(counts, 0, WIDTHS * sizeof(size_t));
    for (size_t i = 0; i < n; i++) counts[symbols[i] >> 3]++;
    for (size_t w = 1; w < WIDTHS; w++) {
        const size_t rest = w & 7, planes = rest & 1 ? 8 : rest == 4 ? 2 : 4;
        total += counts[w] * (w >> 3) + (rest ? (counts[w] + planes - 1) / planes * (planes * rest / 8) : 0);
    }
    return total;
}

/* Where the next code of a width goes, or comes from: its place among whole bytes, and in the packed bits. */
typedef struct { size_t done, n, m, i; unsigned bit; uint8_t *whole, *packed; } place;

static void laid_out(place *places, const size_t *counts, uint8_t *at)
{
    for (size_t w = 1; w < WIDTHS; w++) {
        const size_t rest = w & 7, planes = rest & 1 ? 8 : rest == 4 ? 2 : 4, m = (counts[w] + planes - 1) / planes;
        places[w] = (place){0, counts[w], m, 0, 0, at, at + counts[w] * (w >> 3)};
        at += counts[w] * (w >> 3) + (rest ? m * (planes * rest / 8) : 0);
    }
}

#define NEXT(p, rest) p->done++; if (++p->i == p->m) { p->i = 0; p->bit += (unsigned)(rest); }

/* The symbols of numbers; returns how many bytes their low bits take, or -1 where a number is over 2**32 - 9. */
FAST int64_t tw_symbols(const uint32_t *numbers, size_t n, uint8_t *symbols)
{
    size_t total = 0, counts[WIDTHS];
    uint32_t most = 0;
    for (size_t i = 0; i < n; i++) most = numbers[i] > most ? numbers[i] : most;
    if (most > UINT32_MAX - 8) return -1;
    for (size_t i = 0; i < n; i++) symbols[i] = (uint8_t)symbol_of(numbers[i] + 8);
    for (size_t i = 0; i < n; i += PAGE) total += counted(symbols + i, n - i < PAGE ? n - i : PAGE, counts);
    return (int64_t)total;
}

/* How many bytes the low bits of numbers with these symbols take; -1 if one stands for no number. */
FAST int64_t tw_lows(const uint8_t *symbols, size_t n)
{
    size_t total = 0, counts[WIDTHS];
    for (size_t i = 0; i < n; i++) if (symbols[i] >= 8 * WIDTHS) return -1;
    for (size_t i = 0; i < n; i += PAGE) total += counted(symbols + i, n - i < PAGE ? n - i : PAGE, counts);
    return (int64_t)total;
}

/* Pack the low bits into zeros. */
FAST int64_t tw_pack(const uint32_t *numbers, const uint8_t *symbols, size_t n, uint8_t *out)
{
    size_t counts[WIDTHS];
    place places[WIDTHS];
    for (size_t page = 0; page < n; page += PAGE) {
        const size_t stop = n - page < PAGE ? n : page + PAGE, nbytes = counted(symbols + page, stop - page, counts);
        laid_out(places, counts, out);
        for (size_t j = page; j < stop; j++) {
            const unsigned w = symbols[j] >> 3, rest = w & 7;
            if (!w) continue;
            place *p = places + w;
            uint32_t low = numbers[j] + 8;
            for (unsigned k = 0; k < w >> 3; k++, low >>= 8) p->whole[k * p->n + p->done] = (uint8_t)low;
            if (rest) {
                const unsigned bits = (low & ((1u << rest) - 1)) << (p->bit & 7);
                uint8_t *to = p->packed + (p->bit >> 3) * p->m + p->i;
                *to |= (uint8_t)bits;
                if (bits >> 8) to[p->m] |= (uint8_t)(bits >> 8);
            }
            NEXT(p, rest)
        }
        out += nbytes;
    }
    return 0;
}

/* Undo that. */
FAST int64_t tw_unpack(const uint8_t *symbols, size_t n, uint8_t *packed, uint32_t *numbers)
{
    size_t counts[WIDTHS];
    place places[WIDTHS];
    for (size_t page = 0; page < n; page += PAGE) {
        const size_t stop = n - page < PAGE ? n : page + PAGE, nbytes = counted(symbols + page, stop - page, counts);
        laid_out(places, counts, packed);
        for (size_t j = page; j < stop; j++) {
            const unsigned w = symbols[j] >> 3, rest = w & 7;
            place *p = places + w;
            uint32_t low = 0;
            if (w) {
                for (unsigned k = 0; k < w >> 3; k++) low |= (uint32_t)p->whole[k * p->n + p->done] << 8 * k;
                if (rest) {
                    const uint8_t *from = p->packed + (p->bit >> 3) * p->m + p->i;
                    unsigned bits = *from;
                    if ((p->bit & 7) + rest > 8) bits |= (unsigned)from[p->m] << 8;
                    low |= (bits >> (p->bit & 7) & ((1u << rest) - 1)) << (w & 24);
                }
                NEXT(p, rest)
            }
            numbers[j] = ((8u | (symbols[j] & 7)) << w) + low - 8;
        }
        packed += nbytes;
    }
    return 0;
}

/* The positions that gaps between them tell of; -1 where one is not below size. */
FAST int64_t tw_summed(const uint32_t *gaps, size_t n, size_t size, int32_t *at)
{
    uint64_t next = 0;
    for (size_t j = 0; j < n; j++) {
        next += gaps[j];
        if (next >= size) return -1;
        at[j] = (int32_t)next++;
    }
    return 0;
}

/* The class of a word by its size, which is the word without its sign, doubled: how many limits it reaches, by
   a table over the highest byte, as limits are multiples of what is below that. */
#define CLASSES(W)                                                                                  \
    const W most = limits[classes - 1];                                                             \
    uint8_t class_of[256];                                                                          \
    for (size_t v = 0, c = 0; v < 256; class_of[v++] = (uint8_t)c)                                  \
        while (c < classes && (W)((W)v << (8 * sizeof(W) - 8)) >= limits[c]) c++;
#define CLASS(W, size) (size_t)class_of[(size) >> (8 * sizeof(W) - 8)]

#define KERNELS(W, SIGNED)                                                                          \
                                                                                                    \
/* How many words differ. */                                                                        \
FAST size_t tw_differing_##W(const W *now, const W *held, size_t n)                                 \
{                                                                                                   \
    size_t count = 0;                                                                               \
    for (size_t p = 0; p < n; p++) count += now[p] != held[p];                                      \
    return count;                                                                                   \
}                                                                                                   \
                                                                                                    \
/* Where two versions of n words differ, counted from start on, and what is there in both. */       \
FAST int64_t tw_compared_##W(const W *now, const W *held, size_t n, int32_t start,                  \
                             int32_t *at, W *old, W *fresh, size_t room)                            \
{                                                                                                   \
    size_t found = 0;                                                                               \
    EACH(n, now[p] != held[p],                                                                      \
        ROOM at[found] = start + (int32_t)p; old[found] = held[p]; fresh[found++] = now[p];)        \
    return (int64_t)found;                                                                          \
}                                                                                                   \
                                                                                                    \
/* Where differences are not 0, and these. */                                                       \
FAST int64_t tw_nonzero_##W(const W *diffs, size_t n, int32_t *at, W *out, size_t room)             \
{                                                                                                   \
    size_t found = 0;                                                                               \
    EACH(n, diffs[p] != 0, ROOM at[found] = (int32_t)p; out[found++] = diffs[p];)                   \
    return (int64_t)found;                                                                          \
}                                                                                                   \
                                                                                                    \
/* The same, where they are told by a bit each, as numpy packs them. */                             \
FAST int64_t tw_marked_##W(const W *diffs, size_t n, uint8_t *bits, W *out, size_t room)            \
{                                                                                                   \
    size_t found = 0;                                                                               \
    EVERY(W, n, diffs[p] != 0, diffs[p])                                                            \
    return (int64_t)found;                                                                          \
}                                                                                                   \
                                                                                                    \
/* How many differences are beyond 1; -1 if any is 0. */                                            \
FAST int64_t tw_larger_##W(const W *diffs, size_t n)                                                \
{                                                                                                   \
    size_t none = 0, larger = 0;                                                                    \
    for (size_t p = 0; p < n; p++) { none += diffs[p] == 0; larger += (W)(diffs[p] + 1) > 2; }      \
    return none ? -1 : (int64_t)larger;                                                             \
}                                                                                                   \
                                                                                                    \
/* Bits of signs, as numpy packs them. */                                                           \
FAST void tw_signs_##W(const W *diffs, size_t n, uint8_t *bits)                                     \
{                                                                                                   \
    for (size_t i = 0; i < n; i += LOOK) {                                                          \
        uint8_t flags[LOOK];                                                                        \
        FLAGS(i, n, (SIGNED)diffs[p] < 0)                                                           \
        write_bits(bits + i / 8, packed(flags), n - i);                                             \
    }                                                                                               \
}                                                                                                   \
                                                                                                    \
/* Where differences are beyond 1, and by how much. */                                              \
FAST int64_t tw_beyond_##W(const W *diffs, size_t n, int32_t *at, W *out, size_t room)              \
{                                                                                                   \
    size_t found = 0;                                                                               \
    EACH(n, BEYOND(W, diffs[p]), ROOM at[found] = (int32_t)p; out[found++] = (W)(SIZE(W, SIGNED, diffs[p]) - 2);) \
    return (int64_t)found;                                                                          \
}                                                                                                   \
                                                                                                    \
/* The same, where they are told by a bit each. */                                                  \
FAST int64_t tw_exceeding_##W(const W *diffs, size_t n, uint8_t *bits, W *out, size_t room)         \
{                                                                                                   \
    size_t found = 0;                                                                               \
    EVERY(W, n, BEYOND(W, diffs[p]), (W)(SIZE(W, SIGNED, diffs[p]) - 2))                            \
    return (int64_t)found;                                                                          \
}                                                                                                   \
                                                                                                    \
/* The bytes of n numbers, all lowest ones first; of differences, as many zigzag numbers. */        \
FAST void tw_planes_##W(const W *restrict words, size_t n, int zigzag, uint8_t *restrict out)       \
{                                                                                                   \
    for (size_t i = 0; i < n; i += CHUNK) {                                                         \
        const size_t here = n - i < CHUNK ? n - i : CHUNK;                                          \
        const W *from = words + i;                                                                  \
        W turned[CHUNK];                                                                            \
        if (zigzag) {                                                                               \
            for (size_t j = 0; j < here; j++) turned[j] = (W)(from[j] << 1) ^ NEGATIVE(W, SIGNED, from[j]);\
            from = turned;                                                                          \
        }                                                                                           \
        for (size_t k = 0; k < sizeof(W); k++) {                                                    \
            uint8_t *to = out + k * n + i;                                                          \
            for (size_t j = 0; j < here; j++) to[j] = (uint8_t)(from[j] >> 8 * k);                  \
        }                                                                                           \
    }                                                                                               \
}                                                                                                   \
                                                                                                    \
FAST void tw_take_##W(const W *words, const int32_t *at, size_t n, W *out)                          \
{                                                                                                   \
    for (size_t j = 0; j < n; j++) out[j] = words[at[j]];                                           \
}                                                                                                   \
                                                                                                    \
FAST void tw_put_##W(W *words, const int32_t *at, size_t n, const W *values)                        \
{                                                                                                   \
    for (size_t j = 0; j < n; j++) words[at[j]] = values[j];                                        \
}                                                                                                   \
                                                                                                    \
/* Sort the differences of n elements, 0 where nothing changed, by the class of their words, and list the k\
   changes that are of no class; -1 where positions are not below n. They must rise. */                         \
FAST int64_t tw_sort_##W(const W *words, size_t n, const W *limits, size_t classes, const int32_t *at,\
                         const W *diffs, size_t k, W **out, int32_t *out_at, W *out_diffs)          \
{                                                                                                   \
    CLASSES(W)                                                                                      \
    W every[CHUNK] = {0}, *to[MOST];                                                                \
    for (size_t c = 0; c < classes; c++) to[c] = out[c];                                            \
    size_t done = 0, found = 0;                                                                     \
    for (size_t start = 0; start < n; start += CHUNK) {                                             \
        const size_t here = n - start < CHUNK ? n - start : CHUNK, first = done;                    \
        const W *own = words + start;                                                               \
        for (; done < k && (uint32_t)at[done] < start + here; done++) {                             \
            if ((uint32_t)at[done] < start) return -1;                                              \
            const size_t p = (uint32_t)at[done] - start;                                            \
            every[p] = diffs[done];                                                                 \
            out_at[found] = at[done];                                                               \
            out_diffs[found] = diffs[done];                                                         \
            found += (W)(own[p] << 1) >= most;                                                      \
        }                                                                                           \
        EACH(here, (W)(own[p] << 1) < most,                                                         \
            const W size = (W)(own[p] << 1);                                                        \
            const size_t c = CLASS(W, size);                                                           \
            if (c < classes) *to[c]++ = every[p];)                                                  \
        for (size_t j = first; j < done; j++) every[(uint32_t)at[j] - start] = 0;                   \
    }                                                                                               \
    for (size_t c = 0; c < classes; c++) out[c] = to[c];                                            \
    return done < k ? -1 : (int64_t)found;                                                          \
}                                                                                                   \
                                                                                                    \
/* Undo that: differences that are not 0 and where they are; -1 where a class has none left. */     \
FAST int64_t tw_unsort_##W(const W *words, size_t n, const W *limits, size_t classes, W **next,     \
                           W *const *stops, int32_t *at, W *diffs)                                  \
{                                                                                                   \
    CLASSES(W)                                                                                      \
    W *from[MOST], *stop[MOST];                                                                     \
    for (size_t c = 0; c < classes; c++) { from[c] = next[c]; stop[c] = stops[c]; }                 \
    int64_t found = 0;                                                                              \
    EACH(n, (W)(words[p] << 1) < most,                                                              \
        const W size = (W)(words[p] << 1);                                                          \
        const size_t c = CLASS(W, size);                                                               \
        if (c >= classes || from[c] == stop[c]) return -1;                                          \
        at[found] = (int32_t)p;                                                                     \
        diffs[found] = *from[c]++;                                                                  \
        found += diffs[found] != 0;)                                                                \
    for (size_t c = 0; c < classes; c++) next[c] = from[c];                                         \
    return found;                                                                                   \
}                                                                                                   \
                                                                                                    \
/* Those changes that are of no class. */                                                           \
FAST size_t tw_outside_##W(const W *words, W most, const int32_t *at, const W *diffs, size_t n,     \
                           int32_t *out_at, W *out)                                                 \
{                                                                                                   \
    size_t found = 0;                                                                               \
    for (size_t j = 0; j < n; j++) {                                                                \
        out_at[found] = at[j];                                                                      \
        out[found] = diffs[j];                                                                      \
        found += (W)(words[at[j]] << 1) >= most;                                                    \
    }                                                                                               \
    return found;                                                                                   \
}                                                                                                   \
                                                                                                    \
/* Changes at two rising lists of positions as one; of two at one position, the first list's. */    \
FAST int64_t tw_merge_##W(const int32_t *at, const W *diffs, size_t n, const int32_t *at2,          \
                          const W *diffs2, size_t n2, int32_t *out_at, W *out)                      \
{                                                                                                   \
    size_t i = 0, j = 0, k = 0;                                                                     \
    while (i < n && j < n2) {                                                                       \
        const int32_t here = at[i], there = at2[j];                                                 \
        const int first = here <= there;                                                            \
        out_at[k] = first ? here : there;                                                           \
        out[k++] = first ? diffs[i] : diffs2[j];                                                    \
        i += first;                                                                                 \
        j += there <= here;                                                                         \
    }                                                                                               \
    for (; i < n; i++, k++) { out_at[k] = at[i]; out[k] = diffs[i]; }                               \
    for (; j < n2; j++, k++) { out_at[k] = at2[j]; out[k] = diffs2[j]; }                            \
    return (int64_t)k;                                                                              \
}

#define HASHES(W, SIGNED)                                                                           \
                                                                                                    \
/* By how much the content hash moves as words at some positions change from old to now. */         \
FAST uint64_t tw_moved_##W(const int32_t *at, const W *old, const W *now, size_t n,                 \
                           const uint64_t *low, const uint64_t *high)                               \
{                                                                                                   \
    uint64_t sum = 0;                                                                               \
    for (size_t j = 0; j < n; j++) {                                                                \
        const uint64_t step = (uint64_t)((int64_t)(SIGNED)now[j] - (int64_t)(SIGNED)old[j]);        \
        sum += step * low[at[j] & ((1 << ROW_BITS) - 1)] * high[at[j] >> ROW_BITS];                 \
    }                                                                                               \
    return sum;                                                                                     \
}                                                                                                   \
                                                                                                    \
/* What n words add to the content hash, or by how much it moves if they were old, unless that is null. */\
FAST uint64_t tw_whole_##W(const W *now, const W *old, size_t n, const uint64_t *low, const uint64_t *high)\
{                                                                                                   \
    uint64_t sum = 0;                                                                               \
    for (size_t row = 0; row << ROW_BITS < n; row++) {                                              \
        const size_t i = row << ROW_BITS, here = n - i < 1 << ROW_BITS ? n - i : 1 << ROW_BITS;     \
        uint64_t part = 0;                                                                          \
        if (old)                                                                                    \
            for (size_t j = 0; j < here; j++)                                                       \
                part += (uint64_t)((int64_t)(SIGNED)now[i + j] - (int64_t)(SIGNED)old[i + j]) * low[j];\
        else                                                                                        \
            for (size_t j = 0; j < here; j++) part += (uint64_t)(int64_t)(SIGNED)now[i + j] * low[j];\
        sum += part * high[row];                                                                    \
    }                                                                                               \
    return sum;                                                                                     \
}                                                                                                   \

KERNELS(uint8_t, int8_t)
KERNELS(uint16_t, int16_t)
KERNELS(uint32_t, int32_t)
KERNELS(uint64_t, int64_t)

HASHES(uint8_t, int8_t)
HASHES(uint16_t, int16_t)
HASHES(uint32_t, int32_t)
