// shared_memory.cpp: the shared memory of the block that runs.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "block.h"

namespace simt {
namespace {

constexpr std::size_t kAlignment = 128;
constexpr unsigned char kPoison = 0xff, kBehindEnd = 0xa5;

// Bytes behind the end that are watched. AddressSanitizer has its own.
constexpr std::size_t kWatched = sanitizer::kAddresses ? 0 : 1024;

// ThreadSanitizer: a fresh mapping for every block, so that blocks that ran before have no part in it. Otherwise one
// that is as large as any launch needed.
unsigned char* allocate(std::size_t bytes) {
    void* memory = nullptr;
    if (sanitizer::kThreads) {
        memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
    } else if (posix_memalign(&memory, kAlignment, bytes)) {
        throw std::bad_alloc();
    }
    return static_cast<unsigned char*>(memory);
}

void release(unsigned char* memory, std::size_t bytes) {
    if (sanitizer::kThreads)
        munmap(memory, bytes);
    else
        std::free(memory);
}

}  // namespace

SharedMemory::~SharedMemory() {
    if (data_) release(data_, capacity_);
}

void SharedMemory::renew(std::size_t bytes) {
    const std::size_t needed = bytes + kWatched;
    const bool exact = sanitizer::kThreads || (sanitizer::kAddresses && capacity_ != needed);
    if (exact || capacity_ < needed) {
        if (data_) release(data_, capacity_);
        capacity_ = std::max(needed, std::size_t{1});
        data_ = allocate(capacity_);
    }
    size_ = bytes;
    std::memset(data_, kPoison, bytes);
    std::memset(data_ + bytes, kBehindEnd, kWatched);
}

bool SharedMemory::was_overrun() const {
    return std::any_of(data_ + size_, data_ + size_ + kWatched, [](unsigned char byte) { return byte != kBehindEnd; });
}

void* shared_bytes(std::size_t needed, Site at) {
    if (needed > block.shared.size())
        fail("the kernel's shared struct has " + std::to_string(needed) + " bytes, but its launch passes " +
                 std::to_string(block.shared.size()),
             at);
    return block.shared.data();
}

}  // namespace simt
