// What a launch was given, as text, so that it can be run again.
#include "device.hpp"
#include "jit/launch.hpp"

namespace deep_gemm_k3::emulator {

std::string record_text(s64 kernel, const std::string& entry, const jit::LaunchRequest& request) {
    std::string out = "{\"kernel\":" + std::to_string(kernel) + ",\"entry\":" + json_text(entry);
    const std::pair<const char*, jit::Dim3> shapes[] = {
        {"grid", request.grid}, {"block", request.block}, {"cluster", request.cluster}};
    for (auto& [name, dim] : shapes)
        out += std::string(",\"") + name + "\":[" + std::to_string(dim.x) + "," + std::to_string(dim.y) + "," +
               std::to_string(dim.z) + "]";
    out += ",\"shared_bytes\":" + std::to_string(request.shared_bytes) + ",\"rank\":" + std::to_string(request.rank) +
           ",\"params\":\"";
    const u8* bytes = static_cast<const u8*>(request.params);
    for (size_t i = 0; i < request.params_bytes; ++i) {
        constexpr char kDigits[] = "0123456789abcdef";
        out += kDigits[bytes[i] >> 4], out += kDigits[bytes[i] & 15];
    }
    return out + "\"}";
}

} // namespace deep_gemm_k3::emulator
