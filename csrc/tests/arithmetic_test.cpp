// The emulated arithmetic of cuda/rt.h against plain C++.
#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstdio>
#include <random>

#include "cuda/prologue.h"
#include "cuda/rt.h"
#include "tests/expect.h"

HQ_NAMESPACE_BEGIN
namespace {

// The C library's own fma in that rounding mode.
float FmaTowardZero(float a, float b, float c) {
  volatile float x = a, y = b, z = c;
  std::fesetround(FE_TOWARDZERO);
  volatile float v = std::fma(x, y, z);
  std::fesetround(FE_TONEAREST);
  return v;
}

void TestArithmetic() {
  std::mt19937 random(2);
  const auto any_float = [&random](int spread) {
    const uint32_t mantissa = random() & (random() % 4 == 0 ? 0x700000u : 0x7fffffu);
    const int exponent = 127 + static_cast<int>(random() % (2 * spread + 1)) - spread;
    return FromBits(static_cast<uint32_t>(std::clamp(exponent, 0, 254)) << 23 | mantissa |
                    (random() & 0x80000000u));
  };
  for (int i = 0; i < 200000; ++i) {
    const int spread = i % 3 == 0 ? 127 : i % 3 == 1 ? 12 : 62;
    const float a = any_float(spread), b = any_float(spread), c = any_float(spread);
    EXPECT(Bits(FmaRz(a, b, c)) == Bits(FmaTowardZero(a, b, c)));
    EXPECT(Bits(FmaRz(a, b, -MulRn(a, b))) == Bits(FmaTowardZero(a, b, -MulRn(a, b))));
    // Once rounded: from the exact product, to a multiple of BF16's unit there.
    const auto x = static_cast<uint16_t>(Bits(a) >> 16), y = static_cast<uint16_t>(Bits(b) >> 16);
    const double product = static_cast<double>(FromBf16(x)) * FromBf16(y);
    int exponent;
    std::frexp(product, &exponent);
    const double unit = std::ldexp(1.0, std::max(exponent - 8, -133));
    const double rounded = std::nearbyint(product / unit) * unit;
    const uint32_t got =
        MulBf16x2(static_cast<uint32_t>(x) << 16 | x, static_cast<uint32_t>(y) << 16 | y);
    const double bf16_max = FromSignedBits(kBf16MaxBits);
    const double value = FromBf16(static_cast<uint16_t>(got));
    EXPECT(got >> 16 == (got & 0xffff));
    EXPECT(std::fabs(rounded) > bf16_max ? std::isinf(value) : value == rounded);
    EXPECT(std::signbit(value) == std::signbit(product));
  }
  EXPECT(MulBf16x2(0x7f808000u, 0x00003f80u) == 0x7fff8000u);
  EXPECT(MaxBf16x2(0x3f803f80u, 0x40000000u) == 0x40003f80u);
  EXPECT(MaxBf16x2(0x7fc0bf80u, 0x4000ff81u) == 0x7fff7fffu);
  EXPECT(MaxBf16x2(0x80008000u, 0x00008000u) == 0x00008000u);
  EXPECT(Permute(0x33221100u, 0x77665544u, 0x7531u) == 0x77553311u);
  EXPECT(Permute(0x00008000u, 0x80000000u, 0x9f89u) == 0xffff00ffu);
  EXPECT(FunnelRight(0x89abcdefu, 0x01234567u, 8) == 0x6789abcdu);
  EXPECT(FunnelRight(0x89abcdefu, 0x01234567u, 32) == 0x89abcdefu);
  EXPECT(Popc(0xf0f01u) == 9 && Clz(1) == 31 && Clz(0) == 32);
  EXPECT(CastPair<E4M3>(1.0f, -2.0f) == 0xc038u);
  EXPECT(CastPair<E2M1>(6.5f, -0.0f) == 0x0807u);
  EXPECT(CastPairBf16(1.0f, FromSignedBits(-1)) == 0x7fc03f80u);
  EXPECT(CastPairFp16(1.0f, FromSignedBits(-1)) == 0x7e003c00u);
  EXPECT(FmaRn(3.0f, 5.0f, 0.5f) == 15.5f);
}

// A rounding to FP16 against the nearest multiple of its spacing, found in FP64: around every FP16
// value and every middle of two, and for any bits.
void TestRoundToFp16() {
  const auto is_right = [](uint32_t bits) {
    const float v = FromBits(bits), rounded = RoundToFp16(v);
    if (IsNan(v)) return IsNan(rounded);
    const double m = std::fabs(static_cast<double>(v));
    const double spacing = std::ldexp(1.0, m < 0x1p-14 ? -24 : std::ilogb(m) - 10);
    const double want = m < 65520.0 ? std::nearbyint(m / spacing) * spacing : HUGE_VAL;
    return Bits(rounded) == Bits(std::copysign(static_cast<float>(want), v));
  };
  bool all = true;
  for (uint32_t code = 0; code < 0x7c00; ++code) {
    const uint32_t low = Bits(FromFp16(static_cast<uint16_t>(code)));
    // Of the largest, to what would be next: 65536.
    const float above = code == 0x7bff ? 65536.0f : FromFp16(static_cast<uint16_t>(code + 1));
    const uint32_t middle = Bits((FromBits(low) + above) / 2.0f);
    for (const uint32_t at : {low, middle}) {
      for (int step = -2; step <= 2; ++step) {
        const uint32_t bits = (at + static_cast<uint32_t>(step)) & 0x7fffffffu;
        all = all && is_right(bits) && is_right(bits | 0x80000000u);
      }
    }
  }
  std::mt19937 random(3);
  for (int i = 0; i < 1000000; ++i) all = all && is_right(random());
  EXPECT(all);
}

}  // namespace
HQ_NAMESPACE_END

int main() {
  using namespace hybridq;
  TestArithmetic();
  TestRoundToFp16();
  std::printf("%d checks, %d failures\n", checks, failures);
  return failures == 0 ? 0 : 1;
}
