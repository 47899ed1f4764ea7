#include "runtime/registry.hpp"

#include "jit_kernels/heuristics/describe.hpp"
#include "runtime/control.hpp"

#include <array>
#include <stdexcept>
#include <sys/syscall.h>
#include <unistd.h>

namespace deep_gemm_k3::runtime {
namespace {

constexpr uint64_t kIndexBits = 12;
constexpr uint64_t kNumEntries = 1 << kIndexBits;

// Entries are reused and never freed, so that a stale handle meets another generation, not freed memory.
std::array<std::atomic<Buffer*>, kNumEntries> entries{};
std::mutex entries_mutex;
uint64_t last_generation = 0;

std::atomic<FaultText> fault_text{nullptr};
std::atomic<void (*)(Buffer&, const std::string&)> device_abort_peers{nullptr};
std::atomic<std::string (*)(Buffer&)> device_abort_report{nullptr};
std::atomic<std::string (*)(Buffer&)> device_abort_probe{nullptr};
std::atomic<void (*)(Buffer&)> device_closed{nullptr};

BufferSpec parse_spec(const std::string& spec_json) {
    const json::Value given = json::parse(spec_json);
    BufferSpec spec;
    spec.shape = heuristics::shape_from_json(given);
    spec.rank = given.int_at("rank");
    spec.num_sms = given.int_at("num_sms");
    spec.timeout_ns = static_cast<uint64_t>(given.at("timeout_ns").as_int());
    spec.target = given.at("target").as_string();
    spec.device = given.at("device").as_string();
    spec.device_index = given.int_or("device_index", 0);
    spec.activation = given.at("activation").as_string();
    const json::Value* owner = given.find("owner");
    spec.owner = owner == nullptr ? 0 : static_cast<uint64_t>(owner->as_int());
    return spec;
}

} // namespace

uint64_t thread_id() {
    static thread_local const uint64_t id = static_cast<uint64_t>(syscall(SYS_gettid));
    return id;
}

void set_device_hooks(const DeviceHooks& hooks) {
    device_abort_peers.store(hooks.abort_peers);
    device_abort_report.store(hooks.abort_report);
    device_abort_probe.store(hooks.abort_probe);
    device_closed.store(hooks.closed);
}

void set_fault_text(FaultText function) {
    fault_text.store(function);
}

void Buffer::poison(const std::string& reason) {
    const std::lock_guard lock(mutex_);
    if (poisoned_.load(std::memory_order_relaxed))
        return;
    reason_ = reason;
    poisoned_.store(true, std::memory_order_release);
}

std::string Buffer::reason() const {
    const std::lock_guard lock(mutex_);
    return reason_;
}

void Buffer::require_usable() {
    if (spec.owner != 0 && spec.owner != thread_id())
        throw std::runtime_error("thread: wanted the one that owns rank " + std::to_string(spec.rank) +
                                 " of the local world, given another");
    if (!poisoned()) {
        const std::string report = abort_report(*this);
        if (report.empty())
            return;
        poison(report);
    }
    throw std::runtime_error("sym_buffer: wanted one without an abort, given one to be re-created: " + reason());
}

int64_t create_buffer(const std::string& spec_json, const std::vector<int64_t>& bases) {
    BufferSpec spec = parse_spec(spec_json);
    const int num_ranks = spec.shape.num_ranks;
    if (num_ranks < 1 || num_ranks > kMaxNumRanks || spec.rank < 0 || spec.rank >= num_ranks)
        throw std::runtime_error("rank: wanted 0 <= rank < num_ranks <= " + std::to_string(kMaxNumRanks) + ", given " +
                                 std::to_string(spec.rank) + " of " + std::to_string(num_ranks));
    if (bases.size() != static_cast<size_t>(num_ranks))
        throw std::runtime_error(
            "base_ptrs: wanted " + std::to_string(num_ranks) + " addresses, given " + std::to_string(bases.size()));
    const std::lock_guard lock(entries_mutex);
    for (uint64_t index = 0; index < kNumEntries; ++index) {
        Buffer* buffer = entries[index].load(std::memory_order_relaxed);
        if (buffer != nullptr && buffer->handle_.load(std::memory_order_relaxed) != 0)
            continue;
        if (buffer == nullptr)
            entries[index].store(buffer = new Buffer, std::memory_order_release);
        buffer->on_cpu_ = spec.device == "cpu";
        buffer->spec = std::move(spec);
        buffer->bases.clear();
        for (const int64_t base : bases)
            buffer->bases.push_back(reinterpret_cast<uint8_t*>(base));
        buffer->reason_.clear();
        buffer->poisoned_.store(false, std::memory_order_relaxed);
        const uint64_t handle = (++last_generation << kIndexBits) | index;
        buffer->handle_.store(handle, std::memory_order_release);
        return static_cast<int64_t>(handle);
    }
    throw std::runtime_error("sym_buffer: wanted fewer than " + std::to_string(kNumEntries) +
                             " live buffers in one process; destroy() those no longer used");
}

Buffer& find_buffer(int64_t handle) {
    const uint64_t wanted = static_cast<uint64_t>(handle);
    Buffer* buffer = entries[wanted % kNumEntries].load(std::memory_order_acquire);
    if (buffer == nullptr || wanted == 0 || buffer->handle_.load(std::memory_order_acquire) != wanted)
        throw std::runtime_error("sym_buffer: wanted a live buffer, given one that was destroyed");
    return *buffer;
}

uint32_t num_local_ranks(const Buffer& buffer) {
    const std::lock_guard lock(entries_mutex);
    uint32_t count = 0;
    for (const auto& entry : entries) {
        const Buffer* other = entry.load(std::memory_order_relaxed);
        if (other == nullptr)
            break; // entries are made in order
        count += other->handle_.load(std::memory_order_relaxed) != 0 && other->bases == buffer.bases;
    }
    return count;
}

// Either the call sees that the handle is gone, or destroy_buffer sees the call: both write before they look.
InUse::InUse(int64_t handle) : buffer_(find_buffer(handle)) {
    buffer_.num_calls_.fetch_add(1);
    if (buffer_.handle_.load() == static_cast<uint64_t>(handle))
        return;
    buffer_.num_calls_.fetch_sub(1);
    find_buffer(handle); // throws
}

InUse::~InUse() {
    buffer_.num_calls_.fetch_sub(1);
}

OnlyCall::OnlyCall(Buffer& buffer) : buffer_(buffer) {
    if (buffer.has_call_.exchange(true, std::memory_order_acquire))
        throw std::runtime_error("sym_buffer: wanted no call inside it, given a second one [sym_buffer.busy]");
}

OnlyCall::~OnlyCall() {
    buffer_.has_call_.store(false, std::memory_order_release);
}

void destroy_buffer(int64_t handle) {
    const std::lock_guard lock(entries_mutex);
    Buffer& buffer = find_buffer(handle);
    buffer.handle_.store(0);
    if (buffer.num_calls_.load() > 0) {
        buffer.handle_.store(static_cast<uint64_t>(handle));
        throw std::runtime_error("sym_buffer: wanted no call inside it, given destroy() while one runs");
    }
    if (buffer.launch_state != nullptr && buffer.free_launch_state != nullptr)
        buffer.free_launch_state(buffer.launch_state);
    buffer.launch_state = nullptr;
    buffer.free_launch_state = nullptr;
    if (const auto closed = device_closed.load())
        closed(buffer);
    buffer.bases.clear();
}

Buffer& use_buffer(int64_t handle) {
    Buffer& buffer = find_buffer(handle);
    buffer.require_usable();
    return buffer;
}

void check_buffer(int64_t handle) {
    Buffer& buffer = use_buffer(handle);
    const auto probe = buffer.on_cpu() ? nullptr : device_abort_probe.load();
    const std::string report = probe == nullptr ? std::string() : probe(buffer);
    if (report.empty())
        return;
    buffer.poison(report);
    buffer.require_usable();
}

void abort_peers(Buffer& buffer, const std::string& message) {
    if (buffer.on_cpu()) {
        for (uint8_t* base : buffer.bases)
            write_abort(base, static_cast<uint32_t>(buffer.spec.rank), message);
    } else if (const auto hook = device_abort_peers.load()) {
        hook(buffer, message);
    }
    buffer.poison("rank " + std::to_string(buffer.spec.rank) + ": " + message);
}

void refuse_call(Buffer& buffer, const std::string& message) {
    if (buffer.spec.shape.num_ranks > 1)
        abort_peers(buffer, message);
}

std::string abort_report(Buffer& buffer) {
    if (buffer.on_cpu())
        return read_abort(buffer.base(), fault_text.load(std::memory_order_relaxed));
    const auto hook = device_abort_report.load(std::memory_order_relaxed);
    return hook == nullptr ? std::string() : hook(buffer);
}

} // namespace deep_gemm_k3::runtime
