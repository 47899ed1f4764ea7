#include "jit/tensor_map.hpp"

#include "jit/driver.hpp"

#include <cstring>
#include <stdexcept>
#include <string>

namespace deep_gemm_k3::jit {
namespace {

constexpr int kNumTypes = 16;
// Bits of one element in device memory.
constexpr int kElementBits[kNumTypes] = {8, 16, 32, 32, 64, 64, 16, 32, 64, 16, 32, 32, 32, 4, 4, 6};
// Bits that one element takes in shared memory: the expanding formats leave gaps.
constexpr int kSharedBits[kNumTypes] = {8, 16, 32, 32, 64, 64, 16, 32, 64, 16, 32, 32, 32, 4, 8, 8};
constexpr uint32_t kSwizzleBytes[] = {0, 32, 64, 128, 128, 128, 128};
constexpr uint64_t kLargestDim = 1ull << 32, kStrideEnd = 1ull << 40;
constexpr uint32_t kLargestBox = 256, kLargestElementStride = 8, kExpandedBox = 128;

bool is_float(TensorMapType type) {
    return (type >= TensorMapType::kFloat16 && type <= TensorMapType::kTFloat32Ftz);
}

bool is_expanding(TensorMapType type) {
    return type == TensorMapType::k16U4Align16B || type == TensorMapType::k16U6Align16B;
}

// Collects what a rule needs to say when it is broken.
class Rules {
  public:
    explicit Rules(std::string_view name) : name_(name) {}

    void require(bool holds, const std::string& field, const std::string& wanted, uint64_t given) const {
        if (!holds)
            throw std::runtime_error("tensor map " + std::string(name_) + ": " + field + ": wanted " + wanted +
                                     ", given " + std::to_string(given));
    }
    void require_multiple(uint64_t value, uint64_t of, const std::string& field) const {
        require(value % of == 0, field, "a multiple of " + std::to_string(of), value);
    }

  private:
    std::string_view name_;
};

std::string indexed(const char* field, uint32_t index) {
    return std::string(field) + "[" + std::to_string(index) + "]";
}

void check_kinds(const TensorMapSpec& s, const Rules& rules) {
    rules.require(static_cast<int>(s.type) < kNumTypes, "type", "a type of the driver", uint64_t(s.type));
    rules.require(s.interleave <= TensorMapInterleave::k32B, "interleave", "0, 1 or 2", uint64_t(s.interleave));
    rules.require(s.swizzle <= TensorMapSwizzle::k128BAtom64B, "swizzle", "0..6", uint64_t(s.swizzle));
    rules.require(s.l2_promotion <= TensorMapL2Promotion::k256B, "l2_promotion", "0..3", uint64_t(s.l2_promotion));
    rules.require(s.fill <= TensorMapFill::kNan, "fill", "0 or 1", uint64_t(s.fill));
    rules.require(s.fill == TensorMapFill::kZeros || is_float(s.type), "fill", "zeros for a type that is no float",
        uint64_t(s.fill));
    const bool interleaved = s.interleave != TensorMapInterleave::kNone;
    rules.require(
        s.rank >= (interleaved ? 3 : 1) && s.rank <= kMaxTensorMapRank, "rank", interleaved ? "3..5" : "1..5", s.rank);
    rules.require(s.interleave != TensorMapInterleave::k32B || s.swizzle == TensorMapSwizzle::k32B, "swizzle",
        "32 bytes with an interleave of 32 bytes", uint64_t(s.swizzle));
    if (is_expanding(s.type)) {
        const bool u4 = s.type == TensorMapType::k16U4Align16B;
        const bool plain = s.swizzle == TensorMapSwizzle::kNone || s.swizzle == TensorMapSwizzle::k128B ||
                           s.swizzle == TensorMapSwizzle::k128BAtom32B;
        rules.require(plain || (!u4 && s.swizzle == TensorMapSwizzle::k128BAtom64B), "swizzle",
            "none, 128 bytes or 128 bytes in atoms of 32 for this packed type", uint64_t(s.swizzle));
        rules.require(u4 || !interleaved, "interleave", "none for a 6-bit type", uint64_t(s.interleave));
    }
}

void check_memory(const TensorMapSpec& s, const Rules& rules) {
    const uint64_t alignment = is_expanding(s.type) || s.interleave == TensorMapInterleave::k32B ? 32 : 16;
    const auto address = reinterpret_cast<uint64_t>(s.address);
    rules.require(address != 0, "address", "one that is not null", address);
    rules.require_multiple(address, alignment, "address");
    for (uint32_t i = 0; i < s.rank; ++i)
        rules.require(s.dims[i] >= 1 && s.dims[i] <= kLargestDim, indexed("dims", i), "1..2^32", s.dims[i]);
    if (is_expanding(s.type))
        rules.require_multiple(s.dims[0], 128, "dims[0]");
    if (s.type == TensorMapType::k16U4Align8B)
        rules.require_multiple(s.dims[0], 2, "dims[0]");
    const uint64_t row_bytes = s.dims[0] * kElementBits[static_cast<int>(s.type)] / 8;
    for (uint32_t i = 0; i + 1 < s.rank; ++i) {
        rules.require(s.strides[i] < kStrideEnd, indexed("strides", i), "less than 2^40", s.strides[i]);
        rules.require_multiple(s.strides[i], alignment, indexed("strides", i));
    }
    if (s.rank > 1 && s.interleave == TensorMapInterleave::kNone && s.dims[1] > 1)
        rules.require(s.strides[0] == 0 || s.strides[0] >= row_bytes || s.rank > 2, "strides[0]",
            "at least the " + std::to_string(row_bytes) + " bytes of a row", s.strides[0]);
}

void check_box(const TensorMapSpec& s, const Rules& rules) {
    for (uint32_t i = 0; i < s.rank; ++i) {
        rules.require(s.box[i] >= 1 && s.box[i] <= kLargestBox, indexed("box", i), "1..256", s.box[i]);
        rules.require(s.element_strides[i] >= 1 && s.element_strides[i] <= kLargestElementStride,
            indexed("element_strides", i), "1..8", s.element_strides[i]);
    }
    if (is_expanding(s.type))
        rules.require(s.box[0] == kExpandedBox, "box[0]", "128 for this packed type", s.box[0]);
    if (s.interleave != TensorMapInterleave::kNone)
        return;
    const uint64_t bits = uint64_t(s.box[0]) * kSharedBits[static_cast<int>(s.type)];
    rules.require(bits % 128 == 0, "box[0]", "a multiple of 16 bytes", s.box[0]);
    const uint32_t span = kSwizzleBytes[static_cast<int>(s.swizzle)];
    rules.require(span == 0 || bits <= span * 8ull, "box[0]",
        "at most the " + std::to_string(span) + " bytes of the swizzle", s.box[0]);
}

TensorMap encode_for_emulator(const TensorMapSpec& s) {
    EmulatedTensorMap map{};
    map.magic = EmulatedTensorMap::kMagic;
    map.address = reinterpret_cast<uint64_t>(s.address);
    for (uint32_t i = 0; i < s.rank; ++i) {
        map.dims[i] = s.dims[i];
        map.box[i] = static_cast<uint16_t>(s.box[i]);
        map.element_strides[i] = static_cast<uint8_t>(s.element_strides[i]);
        if (i + 1 < s.rank)
            map.strides[i] = s.strides[i];
    }
    map.type = static_cast<uint8_t>(s.type);
    map.rank = static_cast<uint8_t>(s.rank);
    map.interleave = static_cast<uint8_t>(s.interleave);
    map.swizzle = static_cast<uint8_t>(s.swizzle);
    map.l2_promotion = static_cast<uint8_t>(s.l2_promotion);
    map.fill = static_cast<uint8_t>(s.fill);
    TensorMap out;
    std::memcpy(&out, &map, sizeof(out));
    return out;
}

TensorMap encode_for_driver(const TensorMapSpec& s, std::string_view name) {
    TensorMap out{};
    const cu::Result result = cu::api().TensorMapEncodeTiled(&out, static_cast<int>(s.type), s.rank,
        const_cast<void*>(s.address), s.dims, s.strides, s.box, s.element_strides, static_cast<int>(s.interleave),
        static_cast<int>(s.swizzle), static_cast<int>(s.l2_promotion), static_cast<int>(s.fill));
    if (result != cu::kSuccess)
        throw std::runtime_error(
            "tensor map " + std::string(name) + ": the CUDA driver refused: " + cu::error_text(result));
    return out;
}

} // namespace

void check_tensor_map(const TensorMapSpec& spec, std::string_view name) {
    const Rules rules(name);
    check_kinds(spec, rules);
    check_memory(spec, rules);
    check_box(spec, rules);
}

TensorMap encode_tensor_map(const TensorMapSpec& spec, Target target, std::string_view name) {
    check_tensor_map(spec, name);
    switch (target) {
    case Target::kCuda:
        return encode_for_driver(spec, name);
    case Target::kEmulator:
        return encode_for_emulator(spec);
    default:
        return TensorMap{};
    }
}

} // namespace deep_gemm_k3::jit
