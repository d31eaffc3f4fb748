// The instructions of AVX-512 that `codes.cpp` uses, in plain C++: its code for AVX-512 with bf16 then runs on a processor that has AVX2 only.
//
// For `-include`, without the flags for AVX-512: what is not written here fails to compile. Each is the operation in Intel's manual. What a compiler
// makes of the same code with those flags is not run, and nothing follows for time.

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#define __AVX512BF16__ 1

namespace emulated {

typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(64)));
typedef uint16_t Narrow __attribute__((vector_size(32)));
typedef uint8_t Bytes __attribute__((vector_size(16)));

template <typename Vector>
inline Vector load(const void* from) {
    Vector found;
    std::memcpy(&found, from, sizeof found);
    return found;
}

inline void store(void* to, __m512i x) { std::memcpy(to, &x, sizeof x); }

inline __m512i twice(__m256i x) {
    const __m256i both[2] = {x, x};
    return load<__m512i>(both);
}

inline __m512 fused(__m512 a, __m512 b, __m512 c) {
    for (int i = 0; i < 16; i++) c[i] = std::fma(a[i], b[i], c[i]);
    return c;
}

// Denormal numbers become zeros of their sign, whatever MXCSR says.
inline Words flushed(Words x) { return x & ((Words)((x & 0x7f800000u) != 0u) | 0x80000000u); }

// VDPBF16PS: the product of the upper numbers of a pair is added first, then that of the lower ones; each addition is rounded.
inline __m512 dot(__m512 sum, __m512bh a, __m512bh b) {
    const auto add = [&](Words x, Words y) {
        sum = fused((__m512)flushed(x), (__m512)flushed(y), (__m512)flushed((Words)sum));
        sum = (__m512)flushed((Words)sum);
    };
    add((Words)a & 0xffff0000u, (Words)b & 0xffff0000u);
    add((Words)a << 16, (Words)b << 16);
    return sum;
}

// VCVTNEPS2BF16: to the nearest, ties to even; infinity stays, NaN is cut off and made quiet.
inline Narrow narrowed(__m512 x) {
    const Words bits = flushed((Words)x), size = bits & 0x7fffffffu;
    const Words is_finite = (Words)(size < 0x7f800000u), is_nan = (Words)(size > 0x7f800000u);
    const Words near = bits + 0x7fffu + (bits >> 16 & 1u);
    return __builtin_convertvector(((near & is_finite) | ((bits | (is_nan & 0x400000u)) & ~is_finite)) >> 16, Narrow);
}

// Of every four of `size` numbers two come from a and two from b, as two bits each say: VSHUFPS (1) and VSHUFF32X4 (4).
inline __m512 shuffled(__m512 a, __m512 b, int which, int size) {
    __m512 found;
    for (int i = 0; i < 16; i++) {
        const int unit = i / size % 4, from = (which >> 2 * unit & 3) * size + i % size + i / (4 * size) * (4 * size);
        found[i] = unit < 2 ? a[from] : b[from];
    }
    return found;
}

// VPERMW: the lower five bits of an index count.
inline __m512i picked(__m512i indices, __m512i x) {
    const Halves from = (Halves)x;
    Halves found = (Halves)indices;
    for (int i = 0; i < 32; i++) found[i] = from[found[i] & 31];
    return (__m512i)found;
}

// VPERMT2W: the lower six bits of an index count, of which the highest says which of the two.
inline __m512i picked(__m512i a, __m512i indices, __m512i b) {
    Halves found = (Halves)indices;
    for (int i = 0; i < 32; i++) found[i] = found[i] & 32 ? ((Halves)b)[found[i] & 31] : ((Halves)a)[found[i] & 31];
    return (__m512i)found;
}

}  // namespace emulated

#define _mm512_loadu_ps(from) emulated::load<__m512>(from)
#define _mm512_loadu_si512(from) emulated::load<__m512i>(from)
#define _mm512_storeu_si512(to, x) emulated::store(to, x)
#define _mm512_storeu_ps(to, x) emulated::store(to, (__m512i)(x))
#define _mm512_setzero_ps() (__m512{})
#define _mm512_set1_ps(x) ((x) - __m512{})
#define _mm512_set1_epi32(x) ((__m512i)((uint32_t)(x) | emulated::Words{}))
#define _mm512_castsi512_ps(x) ((__m512)(x))
#define _mm512_broadcast_i64x4(x) emulated::twice(x)
#define _mm512_mul_ps(a, b) ((a) * (b))
#define _mm512_add_ps(a, b) ((a) + (b))
#define _mm512_shuffle_ps(a, b, which) emulated::shuffled(a, b, which, 1)
#define _mm512_shuffle_f32x4(a, b, which) emulated::shuffled(a, b, which, 4)
#define _mm512_or_si512(a, b) ((a) | (b))
#define _mm512_srli_epi32(x, by) ((__m512i)((emulated::Words)(x) >> (by)))
#define _mm512_slli_epi32(x, by) ((__m512i)((emulated::Words)(x) << (by)))
#define _mm512_cvtepu8_epi32(x) ((__m512i)__builtin_convertvector((emulated::Bytes)(x), emulated::Words))
#define _mm512_cvtepu16_epi32(x) ((__m512i)__builtin_convertvector((emulated::Narrow)(x), emulated::Words))
#define _mm512_permutexvar_epi16(indices, x) emulated::picked(indices, x)
#define _mm512_permutex2var_epi16(a, indices, b) emulated::picked(a, indices, b)
#define _mm512_fmadd_ps(a, b, c) emulated::fused(a, b, c)
#define _mm512_dpbf16_ps(sum, a, b) emulated::dot(sum, a, b)
#define _mm512_cvtneps_pbh(x) ((__m256bh)emulated::narrowed(x))
