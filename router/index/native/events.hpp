// Decoding of event batches, as in events/codec.py: arrays and maps of every vLLM version, and SGLang's variants. All checks of
// untrusted bytes are here.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "digest.hpp"
#include "msgpack.hpp"

namespace blockcast {

// Key of one block besides its tokens, without the LoRA name that vLLM repeats for every block: the salt of a prompt, or a key
// of media or anything else. The router matches no prompt with the latter, so such a block matches nothing.
struct ExtraKey {
    u32 block;
    Text text;  // nothing where the key is no text
};

struct Slice {
    std::size_t begin = 0, count = 0;
};

// A run of stored blocks. Views point into the payload.
struct Stored {
    Slice names, tokens, extras, skipped;  // in the Batch; `skipped`: tokens between an ancestor and the parent
    bool has_parent = false, has_ancestor = false;
    u64 parent = 0, ancestor = 0;
    u32 block_size = 0;
    u32 tier = 0;
    Text lora;  // name of the adapter; made from its number where only that was sent
    Text salt;  // event-level salt (SGLang)
    std::optional<std::int64_t> group;
    Text kind;
    std::optional<u64> window;

    bool has_no_tokens() const { return tokens.count == 0; }  // names without tokens: copies of known blocks
    bool has_all_tokens() const { return names.count > 0 && !has_no_tokens() && tokens.count == names.count * block_size; }
};

struct Removed {
    Slice names, copies;  // in the Batch; `copies`: remaining copies of each name, if the event has them
    u32 tier = 0;
    std::optional<std::int64_t> group;
};

struct Event {
    enum class Kind { Stored, Removed, Cleared } kind;
    std::size_t index;  // index into the vector of its kind; for Cleared: 1 + cleared tier, or 0 for all tiers
};

// Bounds of one event and of one payload; larger ones are malformed.
constexpr std::size_t kNamesMax = 1u << 16, kTokensMax = 1u << 22, kExtrasMax = 1u << 16, kEventsMax = 1u << 20;
constexpr u64 kCopiesMax = 1u << 20;  // copies of one name that a removal leaves or a dump has
constexpr std::size_t kKindMax = 64;        // bytes
constexpr std::size_t kMalformedKept = 16;  // messages; all are counted

// One decoded payload. It is reused for the next one, so that decoding seldom allocates.
struct Batch {
    std::vector<Event> events;
    std::vector<Stored> stored;
    std::vector<Removed> removed;
    std::vector<u64> names;
    std::vector<u32> tokens, skipped, copies;
    std::vector<ExtraKey> extras;
    std::vector<std::string> texts;  // texts that are not in the payload, for views
    std::vector<std::string> malformed;  // messages for the first malformed events
    std::size_t malformed_events = 0, unknown = 0;

    void report(std::string what) {
        if (++malformed_events <= kMalformedKept) malformed.push_back(std::move(what));
    }

    void clear();
};

// Position up to which a payload has been read.
struct Cursor {
    std::size_t at = 0;                          // bytes
    std::size_t event = 0, events = 0, parts = 0;  // the next one, of how many
    bool whole = false;  // the payload's end was read, so that its events may be applied
    bool done = false;
};

// Fill `batch` with the next slice of a payload: whole events for some milliseconds of work, nearly always the whole payload.
// A malformed event adds a message to `batch.malformed` and is skipped. A payload that cannot be read to its end gives one
// message and no events; of a payload with several slices, the first calls search its end and give no events.
void decode(const u8* payload, std::size_t size, const Digester& digester, Batch& batch, Cursor& cursor);

u32 tier_of(Text medium);

// -- fields: names in maps, positions in arrays, values of several kinds --

constexpr std::size_t kBlockSizeMax = (1u << 24) - 1;

enum class Field : u8 {
    BlockHashes, Parent, TokenIds, BlockSize, LoraId, Medium, LoraName, ExtraKeys, GroupIdx, Kind, Window,
    CacheSalt, MediaKeys, Ancestor, SkippedTokens, SkippedKeys, Copies, Ignored,
};
constexpr std::string_view kFieldNames[] = {
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "cache_salt", "mm_keys",
    "skipped_parent_block_hash", "skipped_token_ids", "skipped_extra_keys", "remaining_copy_counts",
};

// Fields in the order of positional events.
constexpr Field kStoredOrder[] = {
    Field::BlockHashes, Field::Parent, Field::TokenIds, Field::BlockSize, Field::LoraId, Field::Medium,
    Field::LoraName, Field::ExtraKeys, Field::GroupIdx, Field::Kind, Field::Window,
    Field::Ignored /* locality */, Field::Ignored /* ownership */, Field::Ignored /* session_id */,
    Field::Ignored /* lookahead_token_ids */, Field::CacheSalt,
};
constexpr Field kRemovedOrder[] = {Field::BlockHashes, Field::Medium, Field::GroupIdx};

inline Field field_named(std::string_view name) {
    const auto at = std::find(std::begin(kFieldNames), std::end(kFieldNames), name);
    return static_cast<Field>(at - std::begin(kFieldNames));  // Ignored follows the fields that have names
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

}  // namespace blockcast
