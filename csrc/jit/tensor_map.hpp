// Tensor maps as one specification: the arguments of the driver's tiled encoder. The driver's rules are checked here,
// with a message, for every target; then the driver encodes the map for a GPU and we encode our own 128 bytes for the
// emulator.
#pragma once
#include <cstdint>
#include <string_view>

#include <deep_gemm_k3/params.cuh>

#include "module.hpp"

namespace deep_gemm_k3::jit {

// Values are the driver's.
enum class TensorMapType : uint8_t {
    kUint8 = 0,
    kUint16,
    kUint32,
    kInt32,
    kUint64,
    kInt64,
    kFloat16,
    kFloat32,
    kFloat64,
    kBFloat16,
    kFloat32Ftz,
    kTFloat32,
    kTFloat32Ftz,
    k16U4Align8B,
    k16U4Align16B,
    k16U6Align16B,
};
enum class TensorMapInterleave : uint8_t { kNone = 0, k16B = 1, k32B = 2 };
enum class TensorMapSwizzle : uint8_t {
    kNone = 0,
    k32B = 1,
    k64B = 2,
    k128B = 3,
    k128BAtom32B = 4,
    k128BAtom32BFlip8B = 5,
    k128BAtom64B = 6,
};
enum class TensorMapL2Promotion : uint8_t { kNone = 0, k64B = 1, k128B = 2, k256B = 3 };
enum class TensorMapFill : uint8_t { kZeros = 0, kNan = 1 };

constexpr int kMaxTensorMapRank = 5;

struct TensorMapSpec {
    TensorMapType type = TensorMapType::kBFloat16;
    uint32_t rank = 2;
    const void* address = nullptr;
    uint64_t dims[kMaxTensorMapRank] = {};        // elements, innermost first
    uint64_t strides[kMaxTensorMapRank - 1] = {}; // bytes, of dims[1..]
    uint32_t box[kMaxTensorMapRank] = {};
    uint32_t element_strides[kMaxTensorMapRank] = {1, 1, 1, 1, 1};
    TensorMapInterleave interleave = TensorMapInterleave::kNone;
    TensorMapSwizzle swizzle = TensorMapSwizzle::k128B;
    TensorMapL2Promotion l2_promotion = TensorMapL2Promotion::k256B;
    TensorMapFill fill = TensorMapFill::kZeros;
};

// What the emulator finds in the 128 bytes.
struct alignas(64) EmulatedTensorMap {
    static constexpr uint64_t kMagic = 0x50414d544b334744ull; // "DG3KTMAP"
    uint64_t magic;
    uint64_t address;
    uint64_t dims[kMaxTensorMapRank];
    uint64_t strides[kMaxTensorMapRank - 1];
    uint16_t box[kMaxTensorMapRank];
    uint8_t element_strides[kMaxTensorMapRank];
    uint8_t type, rank, interleave, swizzle, l2_promotion, fill;
    uint8_t reserved[19];
};
static_assert(sizeof(EmulatedTensorMap) == sizeof(TensorMap));

// Raises "tensor map NAME: FIELD wanted ..., given ..." on the first rule that is broken.
void check_tensor_map(const TensorMapSpec& spec, std::string_view name);

// Checks, then encodes. kNull gives zeros.
TensorMap encode_tensor_map(const TensorMapSpec& spec, Target target, std::string_view name);

} // namespace deep_gemm_k3::jit
