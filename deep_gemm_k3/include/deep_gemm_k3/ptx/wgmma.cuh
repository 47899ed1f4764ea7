// Warpgroup MMA, BF16 x BF16 -> FP32, m64nNk16, N = 8, 16, 24, ..., 160: accumulators += A * B. One wrapper = one
// instruction. A comes from registers (the m64k16 fragment of the PTX ISA) or from shared memory; B from shared memory.
// The accumulator of thread (warp w, group g = lane / 4, t = lane % 4): d[4j + i] is row 16w + g + 8 * (i >> 1),
// column 8j + 2t + (i & 1).
//
// From the first wgmma to the wait that retires it, neither A registers nor accumulators may be touched.
#pragma once
#include "keep.cuh"

namespace deep_gemm_k3::ptx {

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kNumPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kNumPending) : "memory");
}

// Descriptor of a K-major operand whose rows are 128 swizzled bytes, 8 rows of 1024 bytes to a group, the groups 1024
// or more bytes apart. Moving by whole 16-byte units adds to the low word: +32 bytes for each k16 inside the 64 k of a
// row.
struct WgmmaDescriptor {
    uint32_t low;

    __device__ __forceinline__ explicit WgmmaDescriptor(uint32_t shared_address)
        : low(((shared_address & 0x3FFFF) >> 4) | (1u << 16)) {}
    template <uint32_t kGroupBytes = 1024>
    __device__ __forceinline__ uint64_t at(uint32_t byte_offset) const {
        constexpr uint32_t high = (kGroupBytes >> 4) | (1u << 30); // stride between groups; 128-byte swizzle
        return (static_cast<uint64_t>(high) << 32) | (low + (byte_offset >> 4));
    }
};

template <int kN>
struct Wgmma;

// clang-format off
#define DG_ACC4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define DG_ACC8(i) DG_ACC4(i), DG_ACC4(i + 4)
#define DG_ACC12(i) DG_ACC8(i), DG_ACC4(i + 8)
#define DG_ACC16(i) DG_ACC8(i), DG_ACC8(i + 8)
#define DG_ACC20(i) DG_ACC8(i), DG_ACC12(i + 8)
#define DG_ACC24(i) DG_ACC8(i), DG_ACC16(i + 8)
#define DG_ACC28(i) DG_ACC8(i), DG_ACC20(i + 8)
#define DG_ACC32(i) DG_ACC8(i), DG_ACC24(i + 8)
#define DG_ACC36(i) DG_ACC8(i), DG_ACC28(i + 8)
#define DG_ACC40(i) DG_ACC8(i), DG_ACC32(i + 8)
#define DG_ACC44(i) DG_ACC8(i), DG_ACC36(i + 8)
#define DG_ACC48(i) DG_ACC8(i), DG_ACC40(i + 8)
#define DG_ACC52(i) DG_ACC8(i), DG_ACC44(i + 8)
#define DG_ACC56(i) DG_ACC8(i), DG_ACC48(i + 8)
#define DG_ACC60(i) DG_ACC8(i), DG_ACC52(i + 8)
#define DG_ACC64(i) DG_ACC8(i), DG_ACC56(i + 8)
#define DG_ACC68(i) DG_ACC64(i), DG_ACC4(i + 64)
#define DG_ACC72(i) DG_ACC68(i), DG_ACC4(i + 68)
#define DG_ACC76(i) DG_ACC72(i), DG_ACC4(i + 72)
#define DG_ACC80(i) DG_ACC76(i), DG_ACC4(i + 76)
#define DG_LIST4 "%0, %1, %2, %3"
#define DG_LIST8 DG_LIST4 ", %4, %5, %6, %7"
#define DG_LIST12 DG_LIST8 ", %8, %9, %10, %11"
#define DG_LIST16 DG_LIST12 ", %12, %13, %14, %15"
#define DG_LIST20 DG_LIST16 ", %16, %17, %18, %19"
#define DG_LIST24 DG_LIST20 ", %20, %21, %22, %23"
#define DG_LIST28 DG_LIST24 ", %24, %25, %26, %27"
#define DG_LIST32 DG_LIST28 ", %28, %29, %30, %31"
#define DG_LIST36 DG_LIST32 ", %32, %33, %34, %35"
#define DG_LIST40 DG_LIST36 ", %36, %37, %38, %39"
#define DG_LIST44 DG_LIST40 ", %40, %41, %42, %43"
#define DG_LIST48 DG_LIST44 ", %44, %45, %46, %47"
#define DG_LIST52 DG_LIST48 ", %48, %49, %50, %51"
#define DG_LIST56 DG_LIST52 ", %52, %53, %54, %55"
#define DG_LIST60 DG_LIST56 ", %56, %57, %58, %59"
#define DG_LIST64 DG_LIST60 ", %60, %61, %62, %63"

#define DG_LIST68 DG_LIST64 ", %64, %65, %66, %67"
#define DG_LIST72 DG_LIST68 ", %68, %69, %70, %71"
#define DG_LIST76 DG_LIST72 ", %72, %73, %74, %75"
#define DG_LIST80 DG_LIST76 ", %76, %77, %78, %79"

#define DG_WGMMA(N, HALF, A0, A1, A2, A3, A4)                                                                  \
    template <>                                                                                                \
    struct Wgmma<N> {                                                                                          \
        static __device__ __forceinline__ void from_registers(float (&d)[HALF], const uint32_t* a, uint64_t b) {   \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" DG_LIST##HALF "}, {"     \
                         A0 ", " A1 ", " A2 ", " A3 "}, " A4 ", 1, 1, 1, 0;"                                   \
                         : DG_ACC##HALF(0)                                                                     \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                \
        }                                                                                                      \
        static __device__ __forceinline__ void from_shared(float (&d)[HALF], uint64_t a, uint64_t b) {         \
            asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" DG_LIST##HALF "}, "      \
                         A0 ", " A1 ", 1, 1, 1, 0, 0;"                                                         \
                         : DG_ACC##HALF(0)                                                                     \
                         : "l"(a), "l"(b));                                                                    \
        }                                                                                                      \
    };
DG_WGMMA(8, 4, "%4", "%5", "%6", "%7", "%8")
DG_WGMMA(16, 8, "%8", "%9", "%10", "%11", "%12")
DG_WGMMA(24, 12, "%12", "%13", "%14", "%15", "%16")
DG_WGMMA(32, 16, "%16", "%17", "%18", "%19", "%20")
DG_WGMMA(40, 20, "%20", "%21", "%22", "%23", "%24")
DG_WGMMA(48, 24, "%24", "%25", "%26", "%27", "%28")
DG_WGMMA(56, 28, "%28", "%29", "%30", "%31", "%32")
DG_WGMMA(64, 32, "%32", "%33", "%34", "%35", "%36")
DG_WGMMA(72, 36, "%36", "%37", "%38", "%39", "%40")
DG_WGMMA(80, 40, "%40", "%41", "%42", "%43", "%44")
DG_WGMMA(88, 44, "%44", "%45", "%46", "%47", "%48")
DG_WGMMA(96, 48, "%48", "%49", "%50", "%51", "%52")
DG_WGMMA(104, 52, "%52", "%53", "%54", "%55", "%56")
DG_WGMMA(112, 56, "%56", "%57", "%58", "%59", "%60")
DG_WGMMA(120, 60, "%60", "%61", "%62", "%63", "%64")
DG_WGMMA(128, 64, "%64", "%65", "%66", "%67", "%68")
DG_WGMMA(136, 68, "%68", "%69", "%70", "%71", "%72")
DG_WGMMA(144, 72, "%72", "%73", "%74", "%75", "%76")
DG_WGMMA(152, 76, "%76", "%77", "%78", "%79", "%80")
DG_WGMMA(160, 80, "%80", "%81", "%82", "%83", "%84")
#undef DG_WGMMA
#undef DG_LIST4
#undef DG_LIST8
#undef DG_LIST12
#undef DG_LIST16
#undef DG_LIST20
#undef DG_LIST24
#undef DG_LIST28
#undef DG_LIST32
#undef DG_LIST36
#undef DG_LIST40
#undef DG_LIST44
#undef DG_LIST48
#undef DG_LIST52
#undef DG_LIST56
#undef DG_LIST60
#undef DG_LIST64
#undef DG_LIST68
#undef DG_LIST72
#undef DG_LIST76
#undef DG_LIST80
#undef DG_ACC4
#undef DG_ACC8
#undef DG_ACC12
#undef DG_ACC16
#undef DG_ACC20
#undef DG_ACC24
#undef DG_ACC28
#undef DG_ACC32
#undef DG_ACC36
#undef DG_ACC40
#undef DG_ACC44
#undef DG_ACC48
#undef DG_ACC52
#undef DG_ACC56
#undef DG_ACC60
#undef DG_ACC64
#undef DG_ACC68
#undef DG_ACC72
#undef DG_ACC76
#undef DG_ACC80
// clang-format on

} // namespace deep_gemm_k3::ptx
