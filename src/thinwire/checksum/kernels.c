/* CRC-32 as zlib has it, sixteen bytes at a time; __init__.py calls it.

   A run of bytes is a polynomial over GF(2), and its check sum the rest of a division. Four blocks of 128 bits are
   carried along; each step multiplies them by the power of x that brings them forward by what is read next, modulo
   the divisor, which one multiplication without carries does for each half (V. Gopal et al., Fast CRC Computation
   for Generic Polynomials Using PCLMULQDQ, Intel, 2009). Where a processor does that to four blocks at once, sixteen
   are carried along. Only processors with that instruction are served; others have zlib's. */

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

#if __GNUC__ >= 8 || __clang_major__ >= 8
#define WIDE __attribute__((target("avx512f,vpclmulqdq,sse4.1,pclmul")))
#define AHEAD 2048 /* bytes: memory is slower than the sums, and processors of today look no further than a page */

int64_t tw_crc32_wide_there(void)
{
    return tw_crc32_there() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
}

/* Four blocks, as in forward. */
WIDE static inline __m512i forward4(__m512i blocks, __m512i powers, __m512i there)
{
    const __m512i low = _mm512_clmulepi64_epi128(blocks, powers, 0x00);
    return _mm512_ternarylogic_epi64(low, _mm512_clmulepi64_epi128(blocks, powers, 0x11), there, 0x96);
}

/* The four blocks for tw_crc32 to go on from: of the first n bytes, a multiple of 256, their sum begun with crc. */
WIDE static void carried(const uint8_t *data, int64_t n, uint32_t crc, __m128i block[4])
{
    const __m512i by2048 = _mm512_broadcast_i32x4(_mm_set_epi64x(0x01322d1430, 0x011542778a));
    const __m512i by512 = _mm512_broadcast_i32x4(_mm_set_epi64x(0x01c6e41596, 0x0154442bd4));
    __m512i four[4];
    for (int i = 0; i < 4; i++)
        four[i] = _mm512_loadu_si512(data + 64 * i);
    four[0] = _mm512_xor_si512(four[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)~crc)));
    for (data += 256, n -= 256; n > 0; data += 256, n -= 256)
        for (int i = 0; i < 4; i++) {
            _mm_prefetch((const char *)data + AHEAD + 64 * i, _MM_HINT_T0);
            four[i] = forward4(four[i], by2048, _mm512_loadu_si512(data + 64 * i));
        }
    for (int i = 1; i < 4; i++)
        four[0] = forward4(four[0], by512, four[i]);
    _mm512_storeu_si512(block, four[0]);
}
#else
int64_t tw_crc32_wide_there(void) { return 0; }
static void carried(const uint8_t *data, int64_t n, uint32_t crc, __m128i block[4]) {}
#endif

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

/* The check sum of n bytes behind those whose check sum is crc; n is 256 at least. wide: by sixteen blocks. */
CARRYLESS int64_t tw_crc32(const uint8_t *data, int64_t n, uint32_t crc, int64_t wide)
{
    const __m128i by512 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4), by128 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    const int64_t begun = wide ? n & ~(int64_t)255 : 64;
    __m128i block[4];
    if (wide)
        carried(data, begun, crc, block);
    for (int i = 0; i < 4 && !wide; i++)
        block[i] = i ? at(data + 16 * i) : _mm_xor_si128(at(data), _mm_cvtsi32_si128((int)~crc));
    for (data += begun, n -= begun; n >= 64; data += 64, n -= 64)
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
int64_t tw_crc32_wide_there(void) { return 0; }
int64_t tw_crc32(const uint8_t *data, int64_t n, uint32_t crc, int64_t wide) { return 0; }

#endif
