#include "jit/abort.hpp"

#include "jit/driver.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

#include <deep_gemm_k3/plan/call_kind.cuh>
#include <deep_gemm_k3/sync/fault.cuh>

namespace deep_gemm_k3::jit {
namespace {

using plan::AbortCell;
using plan::AbortText;
namespace control = plan::control;

// Pinned memory that copies start from and end in.
struct Staging {
    AbortText text;
    AbortCell cell;
    AbortCell found;
    uint32_t code;
};

struct Writer {
    std::mutex mutex;
    cu::Stream stream = nullptr;
    Staging* staging = nullptr;
};

Writer& writer_of(int device) {
    static std::mutex mutex;
    static std::map<int, Writer> writers;
    const std::lock_guard lock(mutex);
    Writer& writer = writers[device];
    if (writer.staging == nullptr) {
        const cu::ContextScope scope(cu::primary_context(device));
        if (writer.stream == nullptr)
            cu::check(cu::api().StreamCreate(&writer.stream, cu::kStreamNonBlocking), "cuStreamCreate");
        void* memory = nullptr;
        cu::check(cu::api().MemHostAlloc(&memory, sizeof(Staging), cu::kHostAllocPortable), "cuMemHostAlloc");
        writer.staging = static_cast<Staging*>(memory);
    }
    return writer;
}

// Lets this thread use streams that do not capture while another one does.
class RelaxedCapture {
  public:
    RelaxedCapture() { cu::api().ThreadExchangeStreamCaptureMode(&mode_); }
    ~RelaxedCapture() { cu::api().ThreadExchangeStreamCaptureMode(&mode_); }

  private:
    int mode_ = cu::kCaptureModeRelaxed;
};

uint64_t address_in(uint8_t* base, uint64_t offset) {
    return reinterpret_cast<uint64_t>(base) + offset;
}

bool copy_in(Writer& writer, uint64_t to, const void* from, size_t bytes) {
    return cu::api().MemcpyHtoDAsync(to, from, bytes, writer.stream) == cu::kSuccess;
}

bool copy_out(Writer& writer, void* to, uint64_t from, size_t bytes) {
    return cu::api().MemcpyDtoHAsync(to, from, bytes, writer.stream) == cu::kSuccess &&
           cu::api().StreamSynchronize(writer.stream) == cu::kSuccess;
}

// Copies of one stream happen in order: the code becomes visible last.
void write_cell(Writer& writer, uint8_t* base) {
    const uint64_t cell = address_in(base, control::kAbort);
    Staging& staging = *writer.staging;
    if (!copy_out(writer, &staging.found, cell, sizeof(AbortCell)) ||
        (staging.found.code | staging.found.reserved) != 0)
        return;
    if (copy_in(writer, address_in(base, control::kAbortText), &staging.text, sizeof(AbortText)) &&
        copy_in(writer, cell + sizeof(uint32_t), &staging.cell.rank, sizeof(AbortCell) - sizeof(uint32_t)))
        copy_in(writer, cell, &staging.code, sizeof(uint32_t));
}

void write_cells(runtime::Buffer& buffer, const std::string& message) {
    const int device = buffer.spec.device_index;
    Writer& writer = writer_of(device);
    const std::lock_guard lock(writer.mutex);
    const cu::ContextScope scope(cu::primary_context(device));
    const RelaxedCapture relaxed;
    Staging& staging = *writer.staging;
    staging = Staging{};
    const size_t length = std::min(message.size(), sizeof(staging.text.text));
    std::memcpy(staging.text.text, message.data(), length);
    staging.text.length = static_cast<uint32_t>(length);
    staging.cell.rank = static_cast<uint32_t>(buffer.spec.rank);
    staging.cell.where = sync::pack_where(sync::Role::kHost, sync::What::kNone);
    staging.cell.reserved = 1; // claimed, as a kernel's report would claim it
    staging.code = plan::kHostFault;
    for (uint8_t* base : buffer.bases)
        write_cell(writer, base);
    cu::api().StreamSynchronize(writer.stream);
}

std::string host_text(runtime::Buffer& buffer) {
    const int device = buffer.spec.device_index;
    Writer& writer = writer_of(device);
    const std::lock_guard lock(writer.mutex);
    const cu::ContextScope scope(cu::primary_context(device));
    const RelaxedCapture relaxed;
    AbortText& text = writer.staging->text;
    if (!copy_out(writer, &text, address_in(buffer.base(), control::kAbortText), sizeof(AbortText)))
        return "its host refused a call";
    return std::string(text.text, std::min<size_t>(text.length, sizeof(text.text)));
}

std::string probe(runtime::Buffer& buffer) {
    const int device = buffer.spec.device_index;
    Writer& writer = writer_of(device);
    AbortCell found{};
    {
        const std::lock_guard lock(writer.mutex);
        const cu::ContextScope scope(cu::primary_context(device));
        const RelaxedCapture relaxed;
        if (!copy_out(writer, &writer.staging->found, address_in(buffer.base(), control::kAbort), sizeof(AbortCell)))
            return {}; // a broken context shows in what the caller does next
        found = writer.staging->found;
    }
    if (found.code == 0)
        return {};
    return found.code >= plan::kHostFault ? "rank " + std::to_string(found.rank) + ": " + host_text(buffer)
                                          : abort_words(found);
}

template <size_t N>
std::string name_in(const char* const (&names)[N], uint32_t index) {
    return index < N ? names[index] : std::to_string(index);
}

std::string kind_words(uint32_t bits) {
    constexpr const char* kEntries[] = {"routed", "dense", "rs", "sp_rs"};
    const plan::CallKind kind = plan::CallKind::unpacked(bits);
    std::string words = kEntries[static_cast<int>(kind.shared_output)];
    words += kind.activation == Activation::kSiTU ? ", situ" : ", swiglu";
    words += kind.has_clamp ? ", clamp" : "";
    words += kind.fast_math ? ", fast_math" : "";
    words += kind.has_rms_norm ? ", rms norm" : "";
    return kind.shared_hidden == 0 ? words : words + ", shared hidden " + std::to_string(kind.shared_hidden);
}

std::string place_words(uint32_t what, uint32_t index) {
    if (what == static_cast<uint32_t>(sync::What::kRow))
        return "row " + std::to_string(index & 0xFFFFFF) + " of rank " + std::to_string(index >> 24);
    return name_in(sync::kWhatNames, what) + " " + std::to_string(index);
}

std::string fault_words(uint32_t code, uint32_t where, uint32_t index, uint32_t wanted, uint32_t seen) {
    const std::string words = name_in(sync::kFaultNames, code - 1) + ": ";
    if (code - 1 == static_cast<uint32_t>(sync::Fault::kCallsDiffer))
        return words + "wanted " + kind_words(wanted) + ", given on rank " + std::to_string(index) + " " +
               kind_words(seen);
    return words + name_in(sync::kRoleNames, where >> 16) + " at " + place_words(where & 0xffff, index) + ": wanted " +
           std::to_string(wanted) + ", seen " + std::to_string(seen);
}

void free_record(void* record) {
    if (record != nullptr)
        cu::api().MemFreeHost(record);
}

void close_buffer(runtime::Buffer& buffer) {
    free_record(buffer.error_record.exchange(nullptr));
}

// Installed when the library is loaded.
const bool kInstalled = [] {
    runtime::set_device_hooks({.abort_peers = abort_device_peers,
        .abort_report = device_abort_report,
        .abort_probe = probe,
        .closed = close_buffer});
    runtime::set_fault_text(fault_words);
    return true;
}();

} // namespace

plan::AbortCell* error_record(runtime::Buffer& buffer) {
    static std::mutex mutex;
    if (AbortCell* record = buffer.error_record.load(std::memory_order_acquire))
        return record;
    const std::lock_guard lock(mutex);
    if (AbortCell* record = buffer.error_record.load(std::memory_order_acquire))
        return record;
    const int device = buffer.spec.device_index;
    writer_of(device);
    const cu::ContextScope scope(cu::primary_context(device));
    void* memory = nullptr;
    cu::check(cu::api().MemHostAlloc(&memory, sizeof(AbortCell), cu::kHostAllocPortable | cu::kHostAllocDeviceMap),
        "cuMemHostAlloc(error record)");
    std::memset(memory, 0, sizeof(AbortCell));
    buffer.error_record.store(static_cast<AbortCell*>(memory), std::memory_order_release);
    return static_cast<AbortCell*>(memory);
}

void abort_device_peers(runtime::Buffer& buffer, const std::string& message) {
    try {
        write_cells(buffer, message);
    } catch (...) {
        // The caller is about to raise what went wrong first; peers that cannot be reached run into their time-out.
    }
}

std::string abort_words(const plan::AbortCell& cell) {
    return "rank " + std::to_string(cell.rank) + ": " +
           fault_words(cell.code, cell.where, cell.index, cell.wanted, cell.seen);
}

std::string device_abort_report(runtime::Buffer& buffer) {
    AbortCell* record = buffer.error_record.load(std::memory_order_acquire);
    if (record == nullptr || std::atomic_ref(record->code).load(std::memory_order_acquire) == 0)
        return {};
    if (record->code >= plan::kHostFault)
        return "rank " + std::to_string(record->rank) + ": " + host_text(buffer);
    return abort_words(*record);
}

} // namespace deep_gemm_k3::jit
