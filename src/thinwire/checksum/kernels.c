/* CRC-32 as zlib has it, sixteen bytes at a time; __init__.py calls it.

   A run of bytes is a polynomial over GF(2), and its check sum the rest of a division. Four blocks of 128 bits are
   carried along; each step multiplies them by the power of x that brings them forward by what is read next, modulo
   the divisor, which one multiplication without carries does for each half (V. Gopal et al., Fast CRC Computation
   for Generic Polynomials Using PCLMULQDQ, Intel, 2009). Only processors with that instruction are served; others
   have zlib's. */

#include "passes.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define CARRYLESS __attribute__((target("sse4.1,pclmul")))

int64_t tw_crc32_there(void) { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"); }

/* Bring a block forward, by the two powers of a pair, and add what stands there. */
CARRYLESS static inline __m128i forward(__m128i block, __m128i powers, __m128i there)
{
    const __m128i low = _mm_clmulepi64_si128(block, powers, 0x00), high = _mm_clmulepi64_si128(block, powers, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), there);
}

CARRYLESS static inline __m128i at(const uint8_t *data) { return _mm_loadu_si128((const __m128i *)data); }

/* The rest of the division of 128 bits, their order reversed as in all of CRC-32. */
CARRYLESS static uint32_t rest(__m128i block)
{
    const __m128i low32 = _mm_setr_epi32(-1, 0, -1, 0);
    const __m128i by64 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0), by32 = _mm_set_epi64x(0, 0x0163cd6124);
    const __m128i barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);
    __m128i t = _mm_clmulepi64_si128(block, by64, 0x10);
    block = _mm_xor_si128(_mm_srli_si128(block, 8), t);
    t = _mm_srli_si128(block, 4);
    block = _mm_xor_si128(_mm_clmulepi64_si128(_mm_and_si128(block, low32), by32, 0x00), t);
    t = _mm_clmulepi64_si128(_mm_and_si128(block, low32), barrett, 0x10);
    t = _mm_clmulepi64_si128(_mm_and_si128(t, low32), barrett, 0x00);
    return (uint32_t)_mm_extract_epi32(_mm_xor_si128(block, t), 1);
}

/* The check sum of n bytes behind those whose check sum is crc; n is 64 at least. */
CARRYLESS int64_t tw_crc32(const uint8_t *data, int64_t n, uint32_t crc)
{
    const __m128i by512 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4), by128 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    __m128i block[4];
    for (int i = 0; i < 4; i++)
        block[i] = at(data + 16 * i);
    block[0] = _mm_xor_si128(block[0], _mm_cvtsi32_si128((int)~crc));
    for (data += 64, n -= 64; n >= 64; data += 64, n -= 64)
        for (int i = 0; i < 4; i++)
            block[i] = forward(block[i], by512, at(data + 16 * i));
    for (int i = 1; i < 4; i++)
        block[0] = forward(block[0], by128, block[i]);
    for (; n >= 16; data += 16, n -= 16)
        block[0] = forward(block[0], by128, at(data));
    uint32_t sum = rest(block[0]);
    for (; n > 0; data++, n--) {
        sum ^= *data;
        for (int bit = 0; bit < 8; bit++)
            sum = sum >> 1 ^ (UINT32_C(0xedb88320) & (0 - (sum & 1)));
    }
    return (int64_t)(uint32_t)~sum;
}

#else

int64_t tw_crc32_there(void) { return 0; }
int64_t tw_crc32(const uint8_t *data, int64_t n, uint32_t crc) { return 0; }

#endif
