// The live symmetric buffers of this process, found by handle. Python owns the memory; an entry holds what a call needs
// to know about it, and whether the buffer still accepts work.
#pragma once

#include "deep_gemm_k3/config.cuh"
#include "deep_gemm_k3/plan/workspace.cuh"

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace deep_gemm_k3::runtime {

struct BufferSpec {
    BufferShape shape{};
    int rank = 0;
    int num_sms = 0; // share of the device that launches on this buffer may use
    uint64_t timeout_ns = 0;
    std::string target; // "sm_90a", "sm_100a"; on the CPU the emulated one
    std::string device; // "cpu" or "cuda"
    int device_index = 0;
    std::string activation; // only sized the buffer
    uint64_t owner = 0;     // id of the only thread that may use the buffer; 0: any
};

class Buffer {
  public:
    BufferSpec spec;
    std::vector<uint8_t*> bases; // every rank's buffer as this process (CPU) or device (CUDA) addresses it
    // What the launch layer keeps per buffer. Freed with the buffer.
    void* launch_state = nullptr;
    void (*free_launch_state)(void*) = nullptr;
    // Where kernels report, in pinned host memory; buffers in device memory only, made on first use.
    std::atomic<plan::AbortCell*> error_record{nullptr};

    bool on_cpu() const { return on_cpu_; }
    uint8_t* base() const { return bases[spec.rank]; }
    // Refuse all work from now on. The first reason stays.
    void poison(const std::string& reason);
    bool poisoned() const { return poisoned_.load(std::memory_order_acquire); }
    std::string reason() const;
    // Calls that are inside the buffer now.
    int num_calls() const { return num_calls_.load(); }
    // Throws when the calling thread is not the owner, or when this or any rank has aborted.
    void require_usable();

  private:
    friend int64_t create_buffer(const std::string&, const std::vector<int64_t>&);
    friend void destroy_buffer(int64_t);
    friend Buffer& find_buffer(int64_t);
    friend uint32_t num_local_ranks(const Buffer&);
    friend class InUse;
    friend class OnlyCall;

    std::atomic<int> num_calls_{0};
    std::atomic<bool> has_call_{false}; // what num_calls_ counts may nest: a call on the CPU waits in barriers
    mutable std::mutex mutex_;
    std::atomic<uint64_t> handle_{0}; // 0: this entry is free
    std::atomic<bool> poisoned_{false};
    bool on_cpu_ = true;
    std::string reason_;
};

// What the launch layer does for buffers in device memory. Unset functions mean that there is nothing to do.
struct DeviceHooks {
    // Write the abort cells of all ranks, without waiting for kernels in flight.
    void (*abort_peers)(Buffer&, const std::string& message) = nullptr;
    // The report of a kernel that aborted, or an empty string. Must not synchronise.
    std::string (*abort_report)(Buffer&) = nullptr;
    // The same, read from this rank's abort cell in device memory, past kernels in flight: also what a peer wrote while
    // this rank ran nothing.
    std::string (*abort_probe)(Buffer&) = nullptr;
    // The buffer is being destroyed: free what was made for it.
    void (*closed)(Buffer&) = nullptr;
};
void set_device_hooks(const DeviceHooks& hooks);
// Puts a kernel's abort cell (plan::AbortCell) into words.
using FaultText = std::string (*)(uint32_t code, uint32_t where, uint32_t index, uint32_t wanted, uint32_t seen);
void set_fault_text(FaultText function);

int64_t create_buffer(const std::string& spec_json, const std::vector<int64_t>& bases);
void destroy_buffer(int64_t handle);
// One array access and one atomic load; throws when the handle is not alive.
Buffer& find_buffer(int64_t handle);
// Keeps a buffer from being destroyed while a call is inside it.
class InUse {
  public:
    explicit InUse(int64_t handle);
    ~InUse();
    InUse(const InUse&) = delete;
    InUse& operator=(const InUse&) = delete;

  private:
    Buffer& buffer_;
};
// A buffer takes one call at a time: a second one would write the first one's state. Throws when there is one inside,
// which stays unharmed; so do peers, since this rank is in the call that they wait for. Of a call on a device only the
// enqueuing counts.
class OnlyCall {
  public:
    explicit OnlyCall(Buffer& buffer);
    ~OnlyCall();
    OnlyCall(const OnlyCall&) = delete;
    OnlyCall& operator=(const OnlyCall&) = delete;

  private:
    Buffer& buffer_;
};
// find_buffer, then require_usable.
Buffer& use_buffer(int64_t handle);

// End all waits of all ranks with `message`, and refuse work on this buffer. For a rank that cannot take part in a call
// that its peers may already be in.
void abort_peers(Buffer& buffer, const std::string& message);
// What a call does that finds an error in its arguments: peers may already be in theirs, so they are aborted. A buffer
// of one rank stays usable.
void refuse_call(Buffer& buffer, const std::string& message);
// What aborted this buffer, or an empty string.
std::string abort_report(Buffer& buffer);

// How many ranks of the buffer's group have their buffer in this process.
uint32_t num_local_ranks(const Buffer& buffer);

// use_buffer, and look into device memory too: for calls off the hot path.
void check_buffer(int64_t handle);

// Kernel's id of the calling thread; costs a system call once per thread.
uint64_t thread_id();

} // namespace deep_gemm_k3::runtime
