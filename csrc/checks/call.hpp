// One call as the checks see it: the arguments, and what is known about the tensors.
#pragma once

#include "deep_gemm_k3/config.cuh"
#include "runtime/registry.hpp"

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace deep_gemm_k3::checks {

enum class Entry : int { kRouted = 0, kDense = 1, kHiddenSharded = 2, kTokenOwner = 3 };
constexpr int kNumEntries = 4;
const char* entry_name(Entry entry);

enum class Tensor : int {
    kY = 0,
    kSharedX,
    kL1Weights,
    kL1WeightsSf,
    kL2Weights,
    kL2WeightsSf,
    kSharedL1Weights,
    kSharedL2Weights,
    kRmsWeight,
    kStatistics,
    kBuffer,
    kSharedY,
    kWorkspace,
    kFlags,
    kPeerPtrs,
    kNumTensors,
};
constexpr int kNumTensors = static_cast<int>(Tensor::kNumTensors);

const char* tensor_name(Tensor tensor);

enum class Dtype : int {
    kOther = 0,
    kUint8,
    kInt8,
    kInt32,
    kInt64,
    kFloat32,
    kBFloat16,
    kFloat8E4M3,
    kFloat16,
    kFloat64,
    kBool,
    kInt16,
    kUint16,
    kUint32,
    kUint64,
    kComplex64,
    kComplex128,
    kFloat8E5M2,
    kNumDtypes
};
const char* dtype_name(Dtype dtype);
int64_t dtype_bytes(Dtype dtype);

constexpr int kMaxRank = 4;

// What a check or a launch wants to know about a tensor, read once.
struct TensorView {
    bool present = false;
    bool contiguous = true;
    bool on_cpu = true;
    Dtype dtype = Dtype::kOther;
    int device_index = 0;
    int rank = 0; // true rank; sizes holds the first kMaxRank of them
    std::array<int64_t, kMaxRank> sizes{};
    int64_t stride0 = 0; // elements
    uint64_t address = 0;

    int64_t numel() const {
        int64_t count = 1;
        for (int i = 0; i < rank && i < kMaxRank; ++i)
            count *= sizes[i];
        return count;
    }
    int64_t num_bytes() const { return numel() * dtype_bytes(dtype); }
};

// Values of device-resident tensors that this host can read: always on the CPU, on request on a device.
struct DeviceValues {
    const int64_t* topk_idx = nullptr; // [num_tokens, num_topk]
    const int32_t* flags = nullptr;
    const int64_t* peer_ptrs = nullptr;
};

struct Call {
    Entry entry = Entry::kRouted;
    const runtime::Buffer* buffer = nullptr;
    std::array<TensorView, kNumTensors> tensors{};
    std::vector<int64_t> recipe;
    std::string activation;
    std::string validate;
    std::optional<double> activation_clamp;
    std::optional<double> situ_beta;
    std::optional<double> situ_linear_beta;
    std::optional<double> rms_epsilon;
    bool fast_math = true;
    bool batch_invariant = false;
    DeviceValues values;

    const TensorView& tensor(Tensor which) const { return tensors[static_cast<int>(which)]; }
    const BufferShape& shape() const { return buffer->spec.shape; }
    bool has_shared() const { return entry != Entry::kRouted; }
    bool is_published() const { return entry == Entry::kHiddenSharded || entry == Entry::kTokenOwner; }
    int64_t num_tokens() const { return tensor(Tensor::kY).sizes[0]; }
    int64_t num_shared_tokens() const { return has_shared() ? tensor(Tensor::kSharedX).sizes[0] : 0; }
    int64_t shared_hidden() const { return has_shared() ? tensor(Tensor::kSharedX).sizes[1] : 0; }
    Activation activation_kind() const { return activation == "situ" ? Activation::kSiTU : Activation::kSwiGLU; }
    int64_t generation_stride() const {
        const TensorView& workspace = tensor(Tensor::kWorkspace);
        return workspace.stride0 * dtype_bytes(workspace.dtype);
    }
};

// Throws std::runtime_error("ENTRY: NAME: wanted ..., given ... [ID]") on the first check that fails. Writes nothing.
void check_call(const Call& call);
// The same for values that had to be read from the device; call.values says which there are.
void check_values(const Call& call);
// Only the rules about the activation's name: all that can be asked of a warm-up's, which has no tensors.
void check_activation(const Call& call);
// JSON array of all checks: id, name, wanted, where ("host", "values", "kernel"), entries.
std::string list_checks();

} // namespace deep_gemm_k3::checks
