// philox.h: the counter-based random numbers behind every draw. Philox4x32-10 of Salmon, Moraes, Dror and Shaw,
// "Parallel Random Numbers: As Easy as 1, 2, 3" (SC11): a function of (counter, key). No generator object, no state.
#pragma once

#include <cstdint>

#include "anywhere.h"

namespace pyengine {

struct PhiloxWords {
    uint32_t w[4];
};

constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;  // multipliers of words 0 and 2
constexpr uint32_t kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;  // what the key grows by each round
constexpr int kPhiloxRounds = 10;

static PYENGINE_ANYWHERE constexpr PhiloxWords philox4x32_10(PhiloxWords counter, uint32_t key0, uint32_t key1) {
    for (int round = 0; round < kPhiloxRounds; ++round) {
        const uint64_t product0 = uint64_t{kPhiloxM0} * counter.w[0];
        const uint64_t product1 = uint64_t{kPhiloxM1} * counter.w[2];
        counter =
            PhiloxWords{{static_cast<uint32_t>(product1 >> 32) ^ counter.w[1] ^ key0, static_cast<uint32_t>(product1),
                         static_cast<uint32_t>(product0 >> 32) ^ counter.w[3] ^ key1, static_cast<uint32_t>(product0)}};
        key0 += kPhiloxW0;
        key1 += kPhiloxW1;
    }
    return counter;
}

// The 32 random bits of one token in one draw: key = seed, counter = (token_id / 4, position, 0, 0), word token_id % 4.
// Counter words 2 and 3 are zero in draws of tokens; another use of the same seed must set one of them.
static PYENGINE_ANYWHERE constexpr uint32_t draw_bits(uint64_t seed, uint32_t position, uint32_t token_id) {
    const PhiloxWords words = philox4x32_10(PhiloxWords{{token_id / 4, position, 0, 0}}, static_cast<uint32_t>(seed),
                                            static_cast<uint32_t>(seed >> 32));
    // Chosen, not indexed: a GPU has no registers that can be.
    const uint32_t even = token_id & 2 ? words.w[2] : words.w[0], odd = token_id & 2 ? words.w[3] : words.w[1];
    return token_id & 1 ? odd : even;
}

}  // namespace pyengine
