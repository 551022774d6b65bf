// Norm + encode and activation + encode of what no tile kernel takes, without y in memory.
#include "cuda/encode_general_mapped.h"

#include "core/with_element.h"
#include "cuda/kernels.h"

HQ_NAMESPACE_BEGIN

namespace cuda {
namespace {

GeneralMappedArgs MakeArgs(const Prologue& map, const GpuPlane& plane, bool is_columnwise) {
  const Matrix x = is_columnwise ? map.x.Transposed() : map.x;
  return {MakeGeneralArgs(x, plane, is_columnwise), MakeMapArgs(map)};
}

}  // namespace

void EncodeGeneralOfMap(const Prologue& map, const GpuPlane& plane, bool is_columnwise,
                        Stream stream) {
  GeneralMappedArgs args = MakeArgs(map, plane, is_columnwise);
  const LaunchShape shape = GeneralShape(&args.general, "EncodeGeneralMapped");
  WithElement(plane.spec.element,
              [&]<class E>() { Launch(EncodeGeneralMapped<E>, shape, stream, args); });
}

void AmaxGeneralOfMap(const Prologue& map, const GpuPlane& plane, bool is_columnwise, float* out,
                      Stream stream) {
  GeneralMappedArgs args = MakeArgs(map, plane, is_columnwise);
  const bool is_empty = map.x.rows == 0 || map.x.cols == 0;
  const int64_t count = plane.spec.row_scaled ? args.general.plane.rows : 1;
  Zero(out, count * static_cast<int64_t>(sizeof(float)), stream);
  if (is_empty) return;
  args.general.plane.scale = reinterpret_cast<uint8_t*>(out);
  const LaunchShape shape = GeneralShape(&args.general, "AmaxGeneralMapped");
  if (plane.spec.row_scaled) {
    Launch(AmaxGeneralMapped<true>, shape, stream, args);
  } else {
    Launch(AmaxGeneralMapped<false>, shape, stream, args);
  }
}

}  // namespace cuda

HQ_NAMESPACE_END
