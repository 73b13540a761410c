// Counts the work of the native parsers for their fuzzers, on any machine the same: a step for each edge of their control flow
// (-fsanitize-coverage=trace-pc calls the first function below), and one for every 16 bytes that the C library searches, compares
// or copies for them.
#include "fuzz_work.hpp"

#include <dlfcn.h>

#include <cstddef>

unsigned long long work = 0;

namespace {

constexpr std::size_t kBytesAStep = 16;

template <class Function>
Function* next(const char* name) {
    return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

void __sanitizer_cov_trace_pc() { ++work; }

void* __asan_memcpy(void*, const void*, std::size_t);
void* __asan_memmove(void*, const void*, std::size_t);

void* memcpy(void* to, const void* from, std::size_t size) {
    work += size / kBytesAStep;
    return __asan_memcpy(to, from, size);
}

void* memmove(void* to, const void* from, std::size_t size) {
    work += size / kBytesAStep;
    return __asan_memmove(to, from, size);
}

void* memchr(const void* data, int value, std::size_t size) {
    static const auto real = next<void*(const void*, int, std::size_t)>("memchr");
    void* const found = real(data, value, size);
    work += (found == nullptr ? size : static_cast<std::size_t>(static_cast<char*>(found) - static_cast<const char*>(data))) / kBytesAStep;
    return found;
}

int memcmp(const void* one, const void* other, std::size_t size) {
    static const auto real = next<int(const void*, const void*, std::size_t)>("memcmp");
    work += size / kBytesAStep;
    return real(one, other, size);
}

}  // extern "C"
