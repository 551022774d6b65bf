// Host side of the decode kernels: which one takes a plane.
#include "cuda/decode.h"

#include "cuda/decode_groups.h"
#include "cuda/kernels.h"
#include "cuda/launch.h"

HQ_NAMESPACE_BEGIN

namespace cuda {
namespace {

DecodeArgs MakeArgs(const PlaneSource& plane, void* out, DType dtype, uint32_t* left_range,
                    const OperandFactors& factors) {
  const Spec& spec = plane.spec;
  DecodeArgs a{};
  a.data = plane.data;
  a.scale = plane.scale;
  a.amax = plane.amax;
  a.out = out;
  a.left_range = left_range;
  a.k_stored = spec.signs >= 0 ? PaddedToHadamard(plane.k) : plane.k;
  a.k_out = plane.operand ? a.k_stored : plane.k;
  a.data_stride = spec.element == Element::kE2M1 ? CeilDiv(a.k_stored, 2) : a.k_stored;
  const bool has_row_scales = HasRowScales(spec);
  a.is_whole = spec.block_cols == 0 && !has_row_scales;
  a.scale_stride = spec.block_cols == 0 ? 1 : CeilDiv(a.k_stored, spec.block_cols);
  a.row_shift = spec.block_cols == 0 ? 0 : Log2(spec.block_rows);
  a.scale_element = spec.scale;
  a.dtype = dtype;
  a.signs = plane.operand ? -1 : spec.signs;
  a.tensor_bound = spec.tensor_bound;
  a.given = factors;
  const bool is_given = IsGiven(factors);
  // A row's scale is its factor: it belongs to the values, and to operands that take all factors.
  a.has_unit_scale = spec.block_cols == 0 && plane.operand && !(has_row_scales && is_given);
  a.has_factor = is_given || (spec.rule == Rule::kTwoLevel && !plane.operand);
  a.is_row_scaled = spec.row_scaled && !has_row_scales && !is_given;
  a.asks_range = plane.operand && left_range != nullptr;
  return a;
}

// Sets what depends on how many codes are counted as one.
void CountBy(int64_t codes, const PlaneSource& plane, DecodeArgs* a) {
  const int64_t per_row = CeilDiv(a->k_stored, codes);
  a->work = plane.rows * per_row;
  a->per_row = MakeFastDivisor(per_row, a->work);
  const int64_t block = plane.spec.block_cols;
  a->block_shift = HasRowScales(plane.spec) ? 31 : a->is_whole ? 0 : Log2(block / codes);
}

// Whether codes and outputs of every vector are aligned.
bool HasVectors(const DecodeArgs& a, bool is_packed, DType dtype) {
  return a.k_stored % kDecodeCodes == 0 && a.k_out == a.k_stored &&
         IsAligned(a.data, is_packed ? kDecodeCodes / 2 : kDecodeCodes) && IsAligned(a.out, 16) &&
         a.k_stored / kDecodeCodes <= kMaxDivisor && ItemBytes(dtype) * kDecodeCodes % 16 == 0;
}

template <class E, ScaleKind kScale, bool kFactored>
void LaunchBitsFor(const PlaneSource& plane, const DecodeArgs& a, cuda::Stream stream) {
  const int64_t block = plane.spec.block_cols;
  const bool is_flat = a.has_unit_scale || (block != 0 && plane.spec.block_rows == 1 &&
                                            a.k_stored % block == 0);
  const LaunchShape shape{CeilDiv(a.work, kDecodeVectors), kDecodeThreads, 0, "DecodeBits"};
  if (is_flat) {
    Launch(DecodeBits<E, kScale, true, kFactored>, shape, stream, a);
  } else {
    Launch(DecodeBits<E, kScale, false, kFactored>, shape, stream, a);
  }
}

template <class E, ScaleKind kScale>
void LaunchBits(const PlaneSource& plane, const DecodeArgs& a, cuda::Stream stream) {
  if (a.has_factor) {
    LaunchBitsFor<E, kScale, true>(plane, a, stream);
  } else {
    LaunchBitsFor<E, kScale, false>(plane, a, stream);
  }
}

template <class E>
void LaunchBitsOf(const PlaneSource& plane, const DecodeArgs& a, cuda::Stream stream) {
  if (a.scale_element == ScaleElement::kE8M0) {
    LaunchBits<E, ScaleKind::kE8M0>(plane, a, stream);
  } else {
    LaunchBits<E, ScaleKind::kFp32>(plane, a, stream);
  }
}

// Whether there was a kernel for these codes and scales.
bool DecodedByBits(const PlaneSource& plane, const DecodeArgs& a, cuda::Stream stream) {
  if (!plane.operand || a.dtype != DType::kBFloat16) return false;
  const Element element = plane.spec.element;
  if (element == Element::kE4M3 && a.has_unit_scale) {
    LaunchBits<E4M3, ScaleKind::kUnit>(plane, a, stream);
  } else if (element == Element::kE5M2 && a.has_unit_scale) {
    LaunchBits<E5M2, ScaleKind::kUnit>(plane, a, stream);
  } else if (element == Element::kE4M3) {
    LaunchBitsOf<E4M3>(plane, a, stream);
  } else if (element == Element::kE5M2) {
    LaunchBitsOf<E5M2>(plane, a, stream);
  } else if (element == Element::kE2M1 && a.scale_element == ScaleElement::kE4M3) {
    LaunchBits<E2M1, ScaleKind::kE4M3>(plane, a, stream);
  } else if (element == Element::kE2M1 && a.scale_element == ScaleElement::kE8M0) {
    LaunchBits<E2M1, ScaleKind::kE8M0>(plane, a, stream);
  } else {
    return false;
  }
  return true;
}

}  // namespace

void DecodePlane(const PlaneSource& plane, void* out, DType dtype, uint32_t* left_range,
                 Stream stream, const OperandFactors& factors) {
  if (plane.rows == 0 || plane.k == 0) return;
  DecodeArgs a = MakeArgs(plane, out, dtype, left_range, factors);
  if (HasVectors(a, plane.spec.element == Element::kE2M1, dtype)) {
    CountBy(kDecodeCodes, plane, &a);
    if (DecodedByBits(plane, a, stream)) return;
    LaunchShape shape{CeilDiv(a.work, kDecodeVectors), kDecodeThreads, 0, "DecodeVector"};
    WithElement(plane.spec.element, [&]<class E>() {
      WithDType(dtype, [&]<DType kOut>() {
        if (a.signs < 0) return Launch(DecodeVector<E, kOut>, shape, stream, a);
        shape.name = "DecodeRotated";
        Launch(DecodeRotated<E, kOut>, shape, stream, a);
      });
    });
    return;
  }
  CountBy(kHadamardSize, plane, &a);
  a.writes_pairs = a.k_out % 2 == 0 && IsAligned(a.out, 2 * ItemBytes(dtype));
  WithElement(plane.spec.element, [&]<class E>() {
    Launch(DecodeGroups<E>, {CeilDiv(a.work, kDecodeGroups), kDecodeThreads, 0, "DecodeGroups"},
           stream, a);
  });
}

}  // namespace cuda

HQ_NAMESPACE_END
