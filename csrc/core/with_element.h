// What follows from a run-time element or input type, for kernels that know it at compile time.
#ifndef HYBRIDQ_CORE_WITH_ELEMENT_H_
#define HYBRIDQ_CORE_WITH_ELEMENT_H_

#include "core/spec.h"
#include "formats/elements.h"
#include "formats/float16.h"

HQ_NAMESPACE_BEGIN

// Calls fn.template operator()<E>() with the traits of `element`.
template <class Fn>
inline __attribute__((always_inline)) auto WithElement(Element element, const Fn& fn) {
  switch (element) {
    case Element::kE5M2:
      return fn.template operator()<E5M2>();
    case Element::kE2M1:
      return fn.template operator()<E2M1>();
    case Element::kE3M2:
      return fn.template operator()<E3M2>();
    case Element::kE2M3:
      return fn.template operator()<E2M3>();
    case Element::kE4M3:
      return fn.template operator()<E4M3>();
    case Element::kOther:  // no kernel takes such a spec: UnsupportedReason
      break;
  }
  Never();
}

// Calls fn.template operator()<kType>() with `dtype` as a constant.
template <class Fn>
inline __attribute__((always_inline)) auto WithDType(DType dtype, const Fn& fn) {
  switch (dtype) {
    case DType::kBFloat16:
      return fn.template operator()<DType::kBFloat16>();
    case DType::kFloat16:
      return fn.template operator()<DType::kFloat16>();
    case DType::kFloat32:
      return fn.template operator()<DType::kFloat32>();
  }
  Never();
}

// The largest finite value of an input type: what a block's overflowing scale becomes.
HQ_HD float InputMax(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return FromSignedBits(kBf16MaxBits);
    case DType::kFloat16:
      return FromSignedBits(kFp16MaxBits);
    case DType::kFloat32:
      return FloatMax();
  }
  Never();
}

HQ_NAMESPACE_END

#endif  // HYBRIDQ_CORE_WITH_ELEMENT_H_
