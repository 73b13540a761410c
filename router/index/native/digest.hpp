// Keys of token prefixes: one number for tokens in a scope, independent of block lengths. It is Rabin's fingerprint over the
// prime field of 2^61 - 1 with a base drawn at random per process. Two different prefixes of L tokens have the same key with
// probability at most (L + 1) / 2^61, and a collision only sends a request to a worker that has to compute it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace blockcast {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using u128 = unsigned __int128;

constexpr u64 kPrime = (u64{1} << 61) - 1;

// x mod 2^61 - 1 for any 128-bit x.
inline u64 reduce(u128 x) {
    u64 sum = (static_cast<u64>(x) & kPrime) + (static_cast<u64>(x >> 61) & kPrime) + static_cast<u64>(x >> 122);
    sum = (sum & kPrime) + (sum >> 61);
    return sum >= kPrime ? sum - kPrime : sum;
}

using Text = std::optional<std::string_view>;

class Digester {
public:
    explicit Digester(u64 seed) : seed_(seed) {
        const u64 base = splitmix(seed) % kPrime;
        text_base_ = splitmix(seed ^ 0x5851F42D4C957F2Dull) % kPrime;
        fingerprint_ = splitmix(seed ^ 0x14057B7EF767814Full);
        powers_[0] = 1;
        for (std::size_t i = 1; i < powers_.size(); ++i) powers_[i] = reduce(u128{powers_[i - 1]} * base);
        opaque_ = text({Text("opaque"), std::nullopt});
    }

    u64 seed() const { return seed_; }
    u64 fingerprint() const { return fingerprint_; }

    // Return the digest after `count` more tokens. Sixteen products at a time are independent, so only one reduction in
    // sixteen tokens waits for the previous one. The sum stays below 2^122 + 16 * 2^93.
    u64 extend(u64 digest, const u32* tokens, std::size_t count) const {
        while (count > 0) {
            const std::size_t n = count < kStride ? count : kStride;
            u128 sum = u128{digest} * powers_[n];
            for (std::size_t i = 0; i < n; ++i) sum += u128{u64{tokens[i]} + 1} * powers_[n - 1 - i];
            digest = reduce(sum);
            tokens += n;
            count -= n;
        }
        return digest;
    }

    // Return a digest that no prompt has, nor anything that continues it: of a block with media or another unknown key.
    u64 make_opaque(u64 digest) const { return reduce(u128{digest} * powers_[1] + opaque_); }

    // Return the digest of a list of optional texts.
    u64 text(std::initializer_list<Text> parts) const {
        return text(parts.size(), parts);
    }
    // Return that digest, continued from the digest of the first texts; before the first, it is the number of texts.
    u64 text(u64 before, std::initializer_list<Text> parts) const {
        for (const Text& part : parts) before = part ? append(before, kText, *part) : step(before, kNone);
        return before;
    }

    u64 bytes(std::string_view raw) const { return append(1, kBytes, raw); }

private:
    static constexpr u64 kNone = 1, kText = 2, kBytes = 3;
    static constexpr std::size_t kStride = 16;

    static u64 splitmix(u64 state) {
        u64 z = state + 0x9E3779B97F4A7C15ull;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        return z ^ (z >> 31);
    }

    u64 step(u64 h, u64 value) const { return reduce(u128{h} * text_base_ + value); }

    u64 append(u64 h, u64 tag, std::string_view raw) const {
        h = step(step(h, tag), raw.size());
        for (std::size_t at = 0; at < raw.size(); at += 4) {
            u32 word = 0;
            for (std::size_t i = 0; i < 4 && at + i < raw.size(); ++i) {
                word |= u32{static_cast<u8>(raw[at + i])} << (8 * i);
            }
            h = step(h, u64{word} + 1);
        }
        return h;
    }

    u64 seed_, text_base_ = 0, fingerprint_ = 0, opaque_ = 0;
    std::array<u64, kStride + 1> powers_{};
};

}  // namespace blockcast
