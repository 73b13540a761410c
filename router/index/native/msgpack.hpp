// Reader of untrusted MessagePack. Every read checks the end of the buffer and throws Truncated. Nested values are skipped
// without recursion.
#pragma once

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string_view>

#include "digest.hpp"

namespace blockcast {

// Thrown where bytes end too early or are no MessagePack, so that nothing after them can be read.
struct Truncated : std::runtime_error {
    using std::runtime_error::runtime_error;
};
// Thrown where a value has another type than expected; it can be skipped.
struct Mismatch : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Return whether bytes are well-formed UTF-8 (RFC 3629): no surrogates, no overlong forms, nothing above U+10FFFF.
inline bool is_utf8(std::string_view text) {
    const auto byte = [&](std::size_t i) { return static_cast<u8>(text[i]); };
    for (std::size_t at = 0; at < text.size();) {
        const u8 head = byte(at);
        if (head < 0x80) {
            ++at;
            continue;
        }
        const std::size_t more = head >= 0xc2 && head <= 0xdf ? 1 : (head & 0xf0) == 0xe0 ? 2 : head >= 0xf0 && head <= 0xf4 ? 3 : 0;
        if (more == 0 || text.size() - at <= more) return false;
        const u8 least = head == 0xe0 ? 0xa0 : head == 0xf0 ? 0x90 : 0x80, most = head == 0xed ? 0x9f : head == 0xf4 ? 0x8f : 0xbf;
        if (byte(at + 1) < least || byte(at + 1) > most) return false;
        for (std::size_t i = 2; i <= more; ++i) {
            if ((byte(at + i) & 0xc0) != 0x80) return false;
        }
        at += more + 1;
    }
    return true;
}

enum class Type : u8 { Nil, Bool, Int, Float, Str, Bin, Array, Map, Ext };

class Reader {
public:
    Reader(const u8* data, std::size_t size) : at_(data), end_(data + size) {}

    const u8* position() const { return at_; }
    void seek(const u8* at) { at_ = at; }
    bool done() const { return at_ == end_; }
    std::size_t left() const { return static_cast<std::size_t>(end_ - at_); }

    [[gnu::always_inline]] Type peek() const {
        need(1);
        const u8 tag = *at_;
        if (tag <= 0x7f || tag >= 0xe0) return Type::Int;
        if (tag <= 0x8f) return Type::Map;
        if (tag <= 0x9f) return Type::Array;
        if (tag <= 0xbf) return Type::Str;
        switch (tag) {
            case 0xc0: return Type::Nil;
            case 0xc2: case 0xc3: return Type::Bool;
            case 0xc4: case 0xc5: case 0xc6: return Type::Bin;
            case 0xca: case 0xcb: return Type::Float;
            case 0xcc: case 0xcd: case 0xce: case 0xcf:
            case 0xd0: case 0xd1: case 0xd2: case 0xd3: return Type::Int;
            case 0xd9: case 0xda: case 0xdb: return Type::Str;
            case 0xdc: case 0xdd: return Type::Array;
            case 0xde: case 0xdf: return Type::Map;
            case 0xc1: throw Truncated("byte 0xc1 is no MessagePack");
            default: return Type::Ext;
        }
    }

    bool take_nil() {
        if (at_ == end_ || *at_ != 0xc0) return false;
        ++at_;
        return true;
    }

    struct Int {
        u64 bits;       // two's complement
        bool negative;
    };

    Int integer() {
        need(1);
        const u8 tag = *at_;
        if (tag <= 0x7f) return ++at_, Int{tag, false};
        if (tag >= 0xe0) return ++at_, signed_int(static_cast<std::int8_t>(tag));
        switch (tag) {
            case 0xcc: return Int{big_endian(1), false};
            case 0xcd: return Int{big_endian(2), false};
            case 0xce: return Int{big_endian(4), false};
            case 0xcf: return Int{big_endian(8), false};
            case 0xd0: return signed_int(static_cast<std::int8_t>(big_endian(1)));
            case 0xd1: return signed_int(static_cast<std::int16_t>(big_endian(2)));
            case 0xd2: return signed_int(static_cast<std::int32_t>(big_endian(4)));
            case 0xd3: return signed_int(static_cast<std::int64_t>(big_endian(8)));
            default: throw Mismatch("expected an int");
        }
    }

    std::string_view str() {
        if (at_ != end_ && *at_ >> 5 == 5) return ++at_, raw(at_[-1] & 0x1f);  // up to 31 bytes, as all names of fields
        if (peek() != Type::Str) throw Mismatch("expected a str");
        const u8 tag = *at_;
        return raw(big_endian(tag == 0xd9 ? 1 : tag == 0xda ? 2 : 4));
    }

    // Read a str, which must be UTF-8.
    std::string_view text() {
        const std::string_view view = str();
        if (!is_utf8(view)) throw Mismatch("a text is no UTF-8");
        return view;
    }

    std::string_view bin() {
        if (peek() != Type::Bin) throw Mismatch("expected bytes");
        const u8 tag = *at_;
        return raw(big_endian(tag == 0xc4 ? 1 : tag == 0xc5 ? 2 : 4));
    }

    // Read the number of items of an array. An item takes at least a byte, which bounds the number.
    std::size_t array() {
        if (peek() != Type::Array) throw Mismatch("expected an array");
        const u8 tag = *at_;
        std::size_t count;
        if (tag <= 0x9f) {
            ++at_;
            count = tag & 0x0f;
        } else {
            count = big_endian(tag == 0xdc ? 2 : 4);
        }
        if (count > left()) throw Truncated("an array ends after the bytes");
        return count;
    }

    // Read the number of pairs of a map.
    std::size_t map() {
        if (peek() != Type::Map) throw Mismatch("expected a map");
        const u8 tag = *at_;
        std::size_t count;
        if (tag <= 0x8f) {
            ++at_;
            count = tag & 0x0f;
        } else {
            count = big_endian(tag == 0xde ? 2 : 4);
        }
        if (count > left() / 2) throw Truncated("a map ends after the bytes");
        return count;
    }

    // Skip one value of any depth.
    void skip() {
        for (std::size_t open = 1; open > 0; --open) {
            switch (peek()) {
                case Type::Nil: case Type::Bool: ++at_; break;
                case Type::Int: integer(); break;
                case Type::Float: big_endian(*at_ == 0xca ? 4 : 8); break;
                case Type::Str: str(); break;
                case Type::Bin: bin(); break;
                case Type::Array: open += array(); break;
                case Type::Map: open += 2 * map(); break;
                case Type::Ext: ext(); break;
            }
        }
    }

    // Read the longest run of non-negative ints of at most 32 bits, for `token_ids`; returns their number. Heads of ids are
    // read one by one, without the switches of `peek` and `integer`.
    std::size_t tokens(u32* out, std::size_t count) {
        std::size_t i = 0;
        for (; i < count && left() > 4; ++i) {
            const u8 tag = *at_;
            if (tag <= 0x7f) {
                out[i] = *at_++;
            } else if (tag >= 0xcc && tag <= 0xce) {
                out[i] = static_cast<u32>(big_endian(std::size_t{1} << (tag - 0xcc)));
            } else {
                break;
            }
        }
        return i;
    }

private:
    // The eight bytes at `at`, the first one lowest.
    static u64 word(const u8* at) {
        u64 value;
        std::memcpy(&value, at, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        value = __builtin_bswap64(value);
#endif
        return value;
    }
    static Int signed_int(std::int64_t value) { return Int{static_cast<u64>(value), value < 0}; }

    void need(std::size_t bytes) const {
        if (left() < bytes) throw Truncated("a value ends after the bytes");
    }

    // The tag and `bytes` behind it.
    u64 big_endian(std::size_t bytes) {
        need(1 + bytes);
        u64 value = 0;
        if (left() > sizeof(value)) {
            value = __builtin_bswap64(word(at_ + 1)) >> (64 - 8 * bytes);
        } else {
            for (std::size_t i = 1; i <= bytes; ++i) value = value << 8 | at_[i];
        }
        at_ += 1 + bytes;
        return value;
    }

    std::string_view raw(std::size_t bytes) {
        need(bytes);
        const std::string_view view(reinterpret_cast<const char*>(at_), bytes);
        at_ += bytes;
        return view;
    }

    void ext() {
        const u8 tag = *at_;
        if (tag >= 0xd4 && tag <= 0xd8) {
            ++at_;
            raw(1 + (std::size_t{1} << (tag - 0xd4)));
        } else {
            const std::size_t bytes = big_endian(tag == 0xc7 ? 1 : tag == 0xc8 ? 2 : 4);
            raw(1 + bytes);
        }
    }

    const u8 *at_, *end_;
};

}  // namespace blockcast
