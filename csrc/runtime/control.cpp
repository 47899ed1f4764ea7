#include "runtime/control.hpp"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <sched.h>
#include <stdexcept>

namespace deep_gemm_k3::runtime {
namespace {

namespace control = plan::control;
using plan::AbortCell;
using plan::AbortText;

std::atomic_ref<uint32_t> word(uint8_t* address) {
    return std::atomic_ref(*reinterpret_cast<uint32_t*>(address));
}

uint64_t now_ns() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return uint64_t(time.tv_sec) * 1'000'000'000u + uint64_t(time.tv_nsec);
}

// Gives the core away a little longer each time: ranks may outnumber cores.
class Backoff {
  public:
    void pause() {
        if (++rounds_ < kSpins) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
        } else if (rounds_ < kSpins + kYields) {
            sched_yield();
        } else {
            const timespec time{0, sleep_ns_};
            nanosleep(&time, nullptr);
            sleep_ns_ = std::min(sleep_ns_ * 2, kLongestSleepNs);
        }
    }

  private:
    static constexpr int kSpins = 64, kYields = 64;
    static constexpr long kLongestSleepNs = 1'000'000;
    int rounds_ = 0;
    long sleep_ns_ = 10'000;
};

std::string rank_list(const std::vector<int>& ranks) {
    std::string out = ranks.size() == 1 ? "rank " : "ranks ";
    for (size_t i = 0; i < ranks.size(); ++i)
        out += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
    return out;
}

// An arrival is a count and the phase it belongs to, in one word so that they cannot be torn.
constexpr int kPhaseBits = 2;
int32_t rounds_ahead(uint32_t seen, uint32_t wanted) {
    const uint32_t mask = (1u << kPhaseBits) - 1;
    return static_cast<int32_t>((seen & ~mask) - (wanted & ~mask)) / (1 << kPhaseBits);
}

uint8_t* arrival(uint8_t* base, int source_rank) {
    return base + control::kHostBarrier + uint64_t(source_rank) * plan::kControlLineBytes;
}

std::vector<int> missing_ranks(const Buffer& buffer, uint32_t wanted) {
    std::vector<int> missing;
    for (int rank = 0; rank < buffer.spec.shape.num_ranks; ++rank) {
        if (rounds_ahead(word(arrival(buffer.base(), rank)).load(std::memory_order_acquire), wanted) < 0)
            missing.push_back(rank);
    }
    return missing;
}

void check_phases(Buffer& buffer, uint32_t wanted) {
    for (int rank = 0; rank < buffer.spec.shape.num_ranks; ++rank) {
        const uint32_t seen = word(arrival(buffer.base(), rank)).load(std::memory_order_acquire);
        if (rounds_ahead(seen, wanted) == 0 && seen != wanted) {
            const std::string message = "barrier: rank " + std::to_string(buffer.spec.rank) + " is in phase " +
                                        std::to_string(wanted & 3) + ", rank " + std::to_string(rank) + " in phase " +
                                        std::to_string(seen & 3);
            abort_peers(buffer, message);
            throw std::runtime_error(message);
        }
    }
}

} // namespace

void write_abort(uint8_t* base, uint32_t rank, const std::string& message) {
    auto* cell = reinterpret_cast<AbortCell*>(base + control::kAbort);
    uint32_t unclaimed = 0;
    if (!std::atomic_ref(cell->reserved).compare_exchange_strong(unclaimed, 1, std::memory_order_acq_rel))
        return;
    auto* text = reinterpret_cast<AbortText*>(base + control::kAbortText);
    text->length = static_cast<uint32_t>(std::min(message.size(), sizeof(text->text)));
    std::memcpy(text->text, message.data(), text->length);
    cell->rank = rank;
    std::atomic_ref(cell->code).store(plan::kHostFault, std::memory_order_release);
}

std::string read_abort(uint8_t* base, FaultText fault_text) {
    auto* cell = reinterpret_cast<AbortCell*>(base + control::kAbort);
    const uint32_t code = std::atomic_ref(cell->code).load(std::memory_order_acquire);
    if (code == 0)
        return {};
    const std::string who = "rank " + std::to_string(cell->rank) + ": ";
    const auto* text = reinterpret_cast<const AbortText*>(base + control::kAbortText);
    if (code >= plan::kHostFault)
        return who + std::string(text->text, std::min<size_t>(text->length, sizeof(text->text)));
    if (fault_text != nullptr)
        return who + fault_text(code, cell->where, cell->index, cell->wanted, cell->seen);
    return who + "fault " + std::to_string(code) + " at " + std::to_string(cell->where) + "[" +
           std::to_string(cell->index) + "], wanted " + std::to_string(cell->wanted) + ", seen " +
           std::to_string(cell->seen);
}

void cpu_barrier(Buffer& buffer, int phase) {
    if (!buffer.on_cpu())
        throw std::runtime_error("cpu_barrier: wanted a buffer in CPU memory, given one on " + buffer.spec.device);
    if (phase < 0 || phase >= 1 << kPhaseBits)
        throw std::runtime_error("phase: wanted 0..3, given " + std::to_string(phase));
    buffer.require_usable();
    const int rank = buffer.spec.rank, num_ranks = buffer.spec.shape.num_ranks;
    const uint32_t last = word(arrival(buffer.base(), rank)).load(std::memory_order_relaxed);
    const uint32_t wanted = (((last >> kPhaseBits) + 1) << kPhaseBits) | uint32_t(phase);
    for (int i = 0; i < num_ranks; ++i)
        word(arrival(buffer.bases[(rank + i) % num_ranks], rank)).store(wanted, std::memory_order_release);

    const uint64_t started = now_ns();
    for (Backoff backoff; !missing_ranks(buffer, wanted).empty(); backoff.pause()) {
        buffer.require_usable();
        if (now_ns() - started < buffer.spec.timeout_ns)
            continue;
        const std::vector<int> missing = missing_ranks(buffer, wanted);
        if (missing.empty())
            break;
        char waited[32];
        std::snprintf(waited, sizeof(waited), "%.1f s", double(now_ns() - started) * 1e-9);
        const std::string message = "barrier: gave up after " + std::string(waited) + " of waiting for " +
                                    rank_list(missing) + " in phase " + std::to_string(phase);
        abort_peers(buffer, message);
        throw std::runtime_error("rank " + std::to_string(rank) + ": " + message);
    }
    check_phases(buffer, wanted);
}

} // namespace deep_gemm_k3::runtime
