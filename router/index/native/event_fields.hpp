// The fields of an event: their names in maps, their places in arrays, and the values that several have.
#pragma once

#include <cstring>
#include <string_view>

#include "events.hpp"

namespace blockcast {

constexpr std::size_t kBlockSizeMax = (1u << 24) - 1;

enum class Field : u8 {
    BlockHashes, Parent, TokenIds, BlockSize, LoraId, Medium, LoraName, ExtraKeys, GroupIdx, Kind, Window,
    CacheSalt, Ignored,
};
constexpr const char* kFieldNames[] = {
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "cache_salt",
};

// Fields in the order of positional events.
constexpr Field kStoredOrder[] = {
    Field::BlockHashes, Field::Parent, Field::TokenIds, Field::BlockSize, Field::LoraId, Field::Medium,
    Field::LoraName, Field::ExtraKeys, Field::GroupIdx, Field::Kind, Field::Window,
    Field::Ignored /* locality */, Field::Ignored /* ownership */, Field::Ignored /* session_id */,
    Field::Ignored /* lookahead_token_ids */, Field::CacheSalt,
};
constexpr Field kRemovedOrder[] = {Field::BlockHashes, Field::Medium, Field::GroupIdx};

// `text == literal`, with the length known to the compiler: no call.
template <std::size_t N>
inline bool is(std::string_view text, const char (&literal)[N]) {
    return text.size() == N - 1 && std::memcmp(text.data(), literal, N - 1) == 0;
}

inline Field field_named(std::string_view name) {
    switch (name.size()) {
        case 6: return is(name, "medium") ? Field::Medium : Field::Ignored;
        case 7: return is(name, "lora_id") ? Field::LoraId : Field::Ignored;
        case 9: return is(name, "token_ids") ? Field::TokenIds : is(name, "lora_name") ? Field::LoraName
                     : is(name, "group_idx") ? Field::GroupIdx : Field::Ignored;
        case 10: return is(name, "block_size") ? Field::BlockSize : is(name, "extra_keys") ? Field::ExtraKeys
                      : is(name, "cache_salt") ? Field::CacheSalt : Field::Ignored;
        case 12: return is(name, "block_hashes") ? Field::BlockHashes : Field::Ignored;
        case 17: return is(name, "parent_block_hash") ? Field::Parent : Field::Ignored;
        case 18: return is(name, "kv_cache_spec_kind") ? Field::Kind : Field::Ignored;
        case 28: return is(name, "kv_cache_spec_sliding_window") ? Field::Window : Field::Ignored;
        default: return Field::Ignored;
    }
}

inline std::optional<std::int64_t> optional_int(Reader& reader) {
    if (reader.take_nil()) return std::nullopt;
    const Reader::Int value = reader.integer();
    if (!value.negative && value.bits >> 63 != 0) throw Mismatch("expected an int less than 2^63");
    return static_cast<std::int64_t>(value.bits);
}

inline Text optional_str(Reader& reader) {
    if (reader.take_nil()) return std::nullopt;
    return reader.text();
}

// Reads one field of a BlockDigests event; true where it was `blocks`.
bool digests_field(Reader& reader, std::string_view name, Digests& digests);

}  // namespace blockcast
