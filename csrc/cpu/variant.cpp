// One table of kernels. CMake compiles this file once per instruction set with its own HQ_VARIANT
// (a namespace), HQ_VARIANT_NAME and -march.
#include "cpu/codes_product_order.h"
#include "cpu/decode.h"
#include "cpu/encode.h"
#include "cpu/kernels.h"
#include "cpu/mapped.h"
#include "cpu/planes_product_wide.h"
#include "cpu/round.h"
#include "cpu/row_amax.h"
#include "cpu/token_rows.h"
#include "cpu/whole.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "random bytes are read in memory order");

HQ_NAMESPACE_BEGIN

static void CastCodes(Element element, const float* src, int64_t n, uint8_t* dst) {
  const FloatEnv env;
  WithElement(element, [=]<class E>() {
    for (int64_t i = 0; i < n; ++i) dst[i] = static_cast<uint8_t>(Cast<E>(src[i]));
  });
}

static void CastCodesStochastic(Element element, const float* src, const uint8_t* random, int64_t n,
                                uint8_t* dst) {
  const FloatEnv env;
  WithElement(element, [=]<class E>() {
    for (int64_t i = 0; i < n; ++i) {
      dst[i] = static_cast<uint8_t>(CastStochastic<E>(src[i], random[i]));
    }
  });
}

static void DecodeCodes(Element element, const uint8_t* src, int64_t n, float* dst) {
  const FloatEnv env;
  WithElement(element, [=]<class E>() { DecodeCodesLoop<E>(src, dst, n); });
}

const Kernels& Table() {
  static constexpr Kernels kTable = {
      HQ_VARIANT_NAME,
      &Encode,
      &EncodePath,
      &DecodePlane,
      &Amax,
      &RowAmax,
      &Hadamard,
      &Transpose,
      &RoundStochastic,
      &MapStore,
      &MapEncode,
      &SumRows,
      &SpreadRows,
      &CastCodes,
      &CastCodesStochastic,
      &DecodeCodes,
      &MultiplyCodesInOrder,
      kReadsCodes,
      kMultiplyPlanes,
  };
  return kTable;
}

HQ_NAMESPACE_END
