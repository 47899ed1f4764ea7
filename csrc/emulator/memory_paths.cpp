// The uncommon paths of memory access: other CTAs' shared memory, local memory, and every error.
#include "exec.hpp"

namespace deep_gemm_k3::emulator {

void fault_misaligned(Warp& w, u64 address, u32 bytes) {
    (void)w;
    throw Fault("misaligned", "access of " + std::to_string(bytes) + " bytes at " + hex(address));
}

SharedPlace shared_place(Warp& w, u64 address, u32 bytes) {
    u32 rank = static_cast<u32>(address) >> 24, offset = static_cast<u32>(address) & 0xffffffu;
    Cluster& cluster = *w.cta->cluster;
    if (rank >= cluster.ctas.size())
        throw Fault("out-of-bounds", "shared address " + hex(static_cast<u32>(address)) + " names CTA " +
                                         std::to_string(rank) + " of a cluster of " +
                                         std::to_string(cluster.ctas.size()));
    Cta* cta = cluster.ctas[rank];
    bool is_inside = offset >= kSharedReserved && u64{offset} + bytes <= cta->shared.size();
    if (!is_inside)
        throw Fault("out-of-bounds", "shared access of " + std::to_string(bytes) + " bytes at offset " +
                                         std::to_string(offset) + "; the CTA has " + std::to_string(kSharedReserved) +
                                         ".." + std::to_string(cta->shared.size()));
    if (cta != w.cta && cta->exited)
        throw Fault(
            "use-after-free", "access to the shared memory of CTA rank " + std::to_string(rank) + ", which has exited");
    return {cta, offset};
}

u8* shared_pointer_slow(Warp& w, u64 address, u32 bytes, bool is_write) {
    if (static_cast<u32>(address) & (bytes - 1))
        fault_misaligned(w, static_cast<u32>(address), bytes);
    SharedPlace place = shared_place(w, address, bytes);
    if (is_write)
        std::memset(place.cta->written.data() + place.offset, 1, bytes);
    return place.cta->shared.data() + place.offset;
}

u8* local_pointer(Warp& w, u64 address, u32 bytes, int lane) {
    u64 size = w.program->local_bytes;
    if (address & (bytes - 1))
        fault_misaligned(w, address, bytes);
    if (address > size || bytes > size - address)
        throw Fault("out-of-bounds", "local access of " + std::to_string(bytes) + " bytes at " +
                                         std::to_string(address) + " of " + std::to_string(size));
    return w.cta->local.data() + (w.index * 32 + static_cast<u32>(lane)) * size + address;
}

u8* resolve_slow(Warp& w, Space space, u64 address, u32 bytes, Access access, int lane) {
    u64 window = address & kWindowMask, inner = address & ~kWindowMask;
    if (space == Space::Generic && window == kSharedWindow)
        return shared_pointer(w, inner, bytes, access != Access::Read);
    if (space == Space::Generic && window == kLocalWindow)
        return local_pointer(w, inner, bytes, lane);
    if (space == Space::Local || (space == Space::Param && window == kLocalWindow))
        return local_pointer(w, inner, bytes, lane);
    bool is_host = space == Space::Param || space == Space::Const;
    if (!is_host)
        throw Fault(
            "out-of-bounds", "access of " + std::to_string(bytes) + " bytes at " + hex(address) + ": no such address");
    if (address & (bytes - 1))
        fault_misaligned(w, address, bytes);
    return w.machine->memory.check(address, bytes, access != Access::Read);
}

void check_initialised(Warp& w, const u8* pointer, u32 bytes, u64 address) {
    SharedPlace place = shared_place(w, address, bytes);
    (void)pointer;
    for (u32 i = 0; i < bytes; ++i) {
        if (place.cta->written[place.offset + i])
            continue;
        w.machine->report_at(w, "uninitialised-shared",
            "read of shared memory that nobody has written, offset " + std::to_string(place.offset + i));
        return;
    }
}

bool meet(Warp& w, const Inst& in, u32 m, u32 members, u32& together) {
    (void)in;
    u32 want = members & w.live;
    if (m & ~want) {
        w.machine->report_at(w, "member-mask",
            "lanes " + hex(m & ~want) + " execute a synchronising instruction whose mask " + hex(members) +
                " does not name them");
        want |= m;
    }
    if (m == want) {
        together = m;
        return true;
    }
    const u32 pc = w.pc - 1;
    // Lanes may come to a warp's barrier from different places; other instructions are executed by all of them at once.
    const bool anywhere = in.run == exec_warp_barrier;
    for (size_t i = 0; i < w.meetings.size(); ++i) {
        Meeting& meeting = w.meetings[i];
        bool is_same = meeting.pc == pc || (anywhere && meeting.anywhere && meeting.want == want);
        if (!is_same || !(meeting.want & m))
            continue;
        meeting.arrived |= m;
        bool is_new = true;
        for (Split* split : meeting.waiting)
            is_new &= split != w.current;
        if (meeting.arrived == meeting.want) {
            together = meeting.want;
            for (Split* split : meeting.waiting) {
                if (split == w.current)
                    continue;
                bool goes_on_here = split->pc == pc && split->node == w.node;
                if (w.machine->options.lanes_apart && goes_on_here) { // as one with the running split
                    w.mask |= split->mask;
                    split->state = SplitState::Dead;
                    continue;
                }
                ++split->pc;
                w.machine->wake(&w, split);
            }
            w.meetings.erase(w.meetings.begin() + static_cast<std::ptrdiff_t>(i));
            return true;
        }
        if (is_new)
            meeting.waiting.push_back(w.current);
        w.block("waits for the other lanes of its warp", meeting.want & ~meeting.arrived, 0);
        return false;
    }
    w.meetings.push_back({pc, want, m, {w.current}, anywhere});
    w.block("waits for the other lanes of its warp", want & ~m, 0);
    return false;
}

} // namespace deep_gemm_k3::emulator
