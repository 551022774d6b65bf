// Scale rules "floor", "ceil" and "even": the E8M0 scale of MX blocks from the exponent of amax.
//
// floor: floor(log2(amax)) - emax, emax the exponent of the element's largest value. ceil: one more
// unless amax is a power of two. even: amax rounded to the element's mantissa first, then floor.
// All on the bits of amax, biased by 127 and clamped to [0, 254]; infinity gives 0xFE, NaN 0xFF.
//
// Source: OCP MX v1.0 section 6.3 (floor); torchao's mx_formats (the other two);
// docs/reference/numerics.md.
#ifndef HYBRIDQ_FORMATS_SCALE_EXPONENT_H_
#define HYBRIDQ_FORMATS_SCALE_EXPONENT_H_

#include "formats/e8m0.h"
#include "formats/element.h"

HQ_NAMESPACE_BEGIN

// The three rules differ in what is added to the bits before the mantissa is dropped.
struct ExponentRule {
  uint32_t add;
  int32_t emax;
};

template <class E>
HQ_HD int32_t ExponentOfMax() {
  return (Derived<E>::kMaxBits >> 23) - 127;
}

template <class E>
HQ_HD ExponentRule FloorRule() {
  return {0u, ExponentOfMax<E>()};
}

// All mantissa ones carry into the exponent unless the mantissa is zero.
template <class E>
HQ_HD ExponentRule CeilRule() {
  return {0x7fffffu, ExponentOfMax<E>()};
}

// Half a unit of the element's mantissa: rounding carries into the exponent only from a mantissa of
// all ones, which is odd, so that a tie goes up in round to even as well.
template <class E>
HQ_HD ExponentRule EvenRule() {
  return {1u << (Derived<E>::kShift - 1), ExponentOfMax<E>()};
}

// `magnitude`: bits of the block's max|x|, infinity and NaN allowed. An amax below 2^-126 has the
// exponent field 0 and so byte 0, as every emax is at least 2.
HQ_HD int32_t ExponentScale(int32_t magnitude, const ExponentRule& rule) {
  const uint32_t up = static_cast<uint32_t>(magnitude) + rule.add;
  int32_t byte = MaxInt(static_cast<int32_t>(up >> 23) - rule.emax, 0);
  byte = magnitude >= kInfBits ? kE8m0MaxByte : byte;
  return magnitude > kInfBits ? kE8m0Nan : byte;
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_FORMATS_SCALE_EXPONENT_H_
