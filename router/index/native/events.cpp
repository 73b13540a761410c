#include "events.hpp"

#include <algorithm>
#include <cctype>

namespace blockcast {

namespace {

constexpr std::size_t kTextsMax = 1024;  // reserved, so that views of earlier texts stay valid

class Decoder {
public:
    Decoder(const u8* payload, std::size_t size, const Digester& digester, Batch& batch)
        : reader_(payload, size), digester_(digester), batch_(batch) {}

    void run(Cursor& cursor, const u8* payload) {
        if (cursor.at == 0) {
            begin_payload(cursor);
        } else {
            reader_.seek(payload + cursor.at);
        }
        const u8* start = reader_.position();
        for (std::size_t work = 0, flat = 0; cursor.event < cursor.events; ++cursor.event) {
            if (work >= kSliceWork) {
                cursor.at = static_cast<std::size_t>(reader_.position() - payload);
                if (!cursor.whole) batch_.clear();
                return;
            }
            const std::size_t malformed = batch_.malformed_events;
            read_event_or_skip(cursor.event);
            flat += 4 + (batch_.malformed_events - malformed) * 80;
            work = flat + batch_.names.size() * 5 + static_cast<std::size_t>(reader_.position() - start) / 16;
        }
        end_payload(cursor);
        cursor.done = true;
    }

    // Skip events up to a bound of bytes. At the payload's end, set the cursor back to its beginning, so that events are read.
    void find_end(Cursor& cursor, const u8* payload) {
        reader_.seek(payload + cursor.at);
        for (const u8* start = reader_.position(); cursor.event < cursor.events; ++cursor.event) {
            if (static_cast<std::size_t>(reader_.position() - start) >= kSteppedOverBytes) {
                cursor.at = static_cast<std::size_t>(reader_.position() - payload);
                return;
            }
            reader_.skip();
        }
        end_payload(cursor);
        cursor = Cursor();
        cursor.whole = true;
    }

private:
    // In steps of some 25 ns: a slice takes a few milliseconds.
    static constexpr std::size_t kSliceWork = 100'000, kSteppedOverBytes = std::size_t{1} << 20;

    void begin_payload(Cursor& cursor) {
        if (reader_.peek() != Type::Array) throw Truncated("expected [ts, events, rank]");
        cursor.parts = reader_.array();
        if (cursor.parts < 2) throw Truncated("expected [ts, events, rank]");
        if (const Type type = reader_.peek(); type != Type::Float && type != Type::Int) throw Truncated("ts is no number");
        reader_.skip();
        if (reader_.peek() != Type::Array) throw Truncated("events is no array");
        cursor.events = reader_.array();
        if (cursor.events > kEventsMax) throw Truncated("too many events");
    }

    void end_payload(const Cursor& cursor) {
        if (cursor.parts > 2 && !reader_.take_nil()) {
            if (reader_.peek() != Type::Int) throw Truncated("the rank is neither int nor nil");
            reader_.integer();
        }
        for (std::size_t i = 3; i < cursor.parts; ++i) reader_.skip();
        if (!reader_.done()) throw Truncated("bytes behind the batch");
    }

    // Structural faults (Truncated) end the payload; an event with a wrong value is skipped as a whole.
    void read_event_or_skip(std::size_t index) {
        const u8* start = reader_.position();
        const std::size_t names = batch_.names.size(), tokens = batch_.tokens.size(), extras = batch_.extras.size();
        const std::size_t skipped = batch_.skipped.size(), copies = batch_.copies.size();
        try {
            read_event();
        } catch (const Mismatch& error) {
            std::string where = "event " + std::to_string(index) + ": ";
            if (field_ != Field::Ignored) {
                where += kind_ == Kind::Removed ? "BlockRemoved." : "BlockStored.";
                where += std::string(kFieldNames[static_cast<std::size_t>(field_)]) + ": ";
            }
            batch_.report(where + error.what());
            batch_.names.resize(names);
            batch_.tokens.resize(tokens);
            batch_.extras.resize(extras);
            batch_.skipped.resize(skipped);
            batch_.copies.resize(copies);
            reader_.seek(start);
            reader_.skip();
        }
    }

    void read_event() {
        field_ = Field::Ignored;
        if (reader_.peek() == Type::Array) {
            const std::size_t count = reader_.array();
            if (count == 0) throw Mismatch("empty array");
            start_event(reader_.text());
            for (std::size_t i = 1; i < count; ++i) read_field(field_at(i - 1));
        } else if (reader_.peek() == Type::Map) {
            const std::size_t count = reader_.map();
            start_event(type_of(count));
            for (std::size_t i = 0; i < count; ++i) read_field(field_named_in_event(reader_.str()));
        } else {
            throw Mismatch("expected a map or an array");
        }
        finish();
    }

    // Return the event's type. Every known engine sends "type" first; elsewhere it costs a second pass over the fields.
    std::string_view type_of(std::size_t count) {
        const u8* body = reader_.position();
        for (std::size_t i = 0; i < count; ++i) {
            if (reader_.str() == "type") {
                const std::string_view type = reader_.text();
                reader_.seek(body);
                return type;
            }
            reader_.skip();
        }
        throw Mismatch("an event without a type");
    }

    enum class Kind : u8 { Stored, Removed, Cleared, Unknown };

    void start_event(std::string_view type) {
        kind_ = type == "BlockStored" ? Kind::Stored : type == "BlockRemoved" ? Kind::Removed
              : type == "AllBlocksCleared" ? Kind::Cleared : Kind::Unknown;
        stored_ = Stored();
        lora_id_.reset();
        medium_.reset();
        text_positions_.clear();
        media_blocks_.clear();
        has_skipped_keys_ = false;
        seen_names_ = seen_tokens_ = seen_size_ = false;
        stored_.names.begin = batch_.names.size();
        stored_.tokens.begin = batch_.tokens.size();
        stored_.extras.begin = batch_.extras.size();
        stored_.skipped.begin = batch_.skipped.size();
        copies_ = Slice{batch_.copies.size(), 0};
        seen_copies_ = false;
    }

    Field field_at(std::size_t i) const {
        if (kind_ == Kind::Stored && i < std::size(kStoredOrder)) return kStoredOrder[i];
        if (kind_ == Kind::Removed && i < std::size(kRemovedOrder)) return kRemovedOrder[i];
        if (kind_ == Kind::Cleared && i == 0) return Field::Medium;
        return Field::Ignored;
    }

    // Return the field with this name; Ignored for a field that the event's type does not have.
    Field field_named_in_event(std::string_view name) const {
        if (kind_ == Kind::Unknown) return Field::Ignored;
        const Field which = field_named(name);
        if (kind_ == Kind::Cleared) return which == Field::Medium ? which : Field::Ignored;
        if (kind_ == Kind::Stored) return which == Field::Copies ? Field::Ignored : which;
        if (which == Field::Copies) return which;
        return std::find(std::begin(kRemovedOrder), std::end(kRemovedOrder), which) == std::end(kRemovedOrder)
                   ? Field::Ignored : which;
    }

    void read_field(Field which) {
        field_ = which;
        switch (which) {
            case Field::BlockHashes: read_names(); break;
            case Field::Parent:
                stored_.has_parent = !reader_.take_nil();
                if (stored_.has_parent) stored_.parent = read_name();
                break;
            case Field::TokenIds: read_tokens(); break;
            case Field::BlockSize: read_block_size(); break;
            case Field::LoraId: lora_id_ = optional_int(reader_); break;
            case Field::Medium: kind_ == Kind::Cleared ? medium_of_cleared() : void(medium_ = optional_str(reader_)); break;
            case Field::LoraName: stored_.lora = optional_str(reader_); break;
            case Field::ExtraKeys: read_extra_keys(); break;
            case Field::GroupIdx: stored_.group = optional_int(reader_); break;
            case Field::Kind:
                stored_.kind = optional_str(reader_);
                if (stored_.kind) check_bound(stored_.kind->size(), kKindMax);
                break;
            case Field::Window: {
                const std::optional<std::int64_t> window = optional_int(reader_);
                stored_.window.reset();
                if (window && *window > 0) stored_.window = static_cast<u64>(*window);
                break;
            }
            case Field::CacheSalt: stored_.salt = optional_str(reader_); break;
            case Field::MediaKeys: read_media_keys(); break;
            case Field::Ancestor:
                stored_.has_ancestor = !reader_.take_nil();
                if (stored_.has_ancestor) stored_.ancestor = read_name();
                break;
            case Field::SkippedTokens: read_skipped_tokens(); break;
            case Field::SkippedKeys: has_skipped_keys_ = read_block_keys([&](u32) { reader_.skip(); }) != 0; break;
            case Field::Copies: read_copies(); break;
            case Field::Ignored: reader_.skip(); break;
        }
        field_ = Field::Ignored;
    }

    // Read the medium of AllBlocksCleared. One that cannot be read means all tiers.
    void medium_of_cleared() {
        medium_.reset();
        if (reader_.peek() != Type::Str) return reader_.skip();
        const std::string_view text = reader_.str();
        if (is_utf8(text)) medium_ = text;
    }

    static std::size_t check_bound(std::size_t count, std::size_t most) {
        if (count > most) too_many(count, most);
        return count;
    }
    [[noreturn, gnu::noinline, gnu::cold]] static void too_many(std::size_t count, std::size_t most) {
        throw Mismatch("has " + std::to_string(count) + ": at most " + std::to_string(most));
    }

    u64 read_name() {
        if (reader_.peek() == Type::Bin) return digester_.bytes(reader_.bin());
        if (reader_.peek() != Type::Int) throw Mismatch("expected a block hash as int or bytes");
        return reader_.integer().bits;
    }

    [[gnu::noinline]] void read_names() {
        const std::size_t count = check_bound(reader_.array(), kNamesMax);
        batch_.names.resize(stored_.names.begin);
        for (std::size_t i = 0; i < count; ++i) batch_.names.push_back(read_name());
        stored_.names.count = count;
        seen_names_ = true;
    }

    [[gnu::noinline]] void read_tokens() {
        text_positions_.clear();
        const std::size_t count = reader_.take_nil() ? 0 : check_bound(reader_.array(), kTokensMax);
        batch_.tokens.resize(stored_.tokens.begin + count);
        u32* out = batch_.tokens.data() + stored_.tokens.begin;
        for (std::size_t i = reader_.tokens(out, count); i < count; ++i) out[i] = read_token(i);
        stored_.tokens.count = count;
        seen_tokens_ = true;
    }

    // Read one entry of token_ids. SGLang under EAGLE sends pairs (token, next token), of which the first counts. TensorRT-LLM
    // sends texts as placeholders of media.
    u32 read_token(std::size_t i) {
        if (reader_.peek() == Type::Str) {
            check_bound(text_positions_.size() + 1, kExtrasMax);
            text_positions_.push_back(i);
            reader_.text();
            return 0;
        }
        if (reader_.peek() == Type::Array) {
            const std::size_t count = reader_.array();
            if (count == 0) throw Mismatch("an empty pair in token_ids");
            const u32 own = read_token_id();
            for (std::size_t i = 1; i < count; ++i) reader_.skip();
            return own;
        }
        return read_token_id();
    }

    u32 read_token_id() {
        const Reader::Int value = reader_.integer();
        if (value.negative || value.bits >> 32 != 0) throw Mismatch("expected 0 <= id < 2^32");
        return static_cast<u32>(value.bits);
    }

    [[gnu::noinline]] void read_skipped_tokens() {
        batch_.skipped.resize(stored_.skipped.begin);
        const std::size_t count = reader_.take_nil() ? 0 : check_bound(reader_.array(), kTokensMax);
        for (std::size_t i = 0; i < count; ++i) batch_.skipped.push_back(read_token_id());
        stored_.skipped.count = count;
    }

    [[gnu::noinline]] void read_copies() {
        batch_.copies.resize(copies_.begin);
        seen_copies_ = !reader_.take_nil();
        const std::size_t count = seen_copies_ ? check_bound(reader_.array(), kNamesMax) : 0;
        for (std::size_t i = 0; i < count; ++i) {
            const Reader::Int value = reader_.integer();
            if (value.negative) throw Mismatch("expected 0 or more");
            batch_.copies.push_back(static_cast<u32>(std::min<u64>(value.bits, kCopiesMax)));
        }
        copies_.count = count;
    }

    // Read a list for each block, or nil. Call read_key(block) for every key in it, which has to read it; return their number.
    template <class ReadKey>
    std::size_t read_block_keys(ReadKey read_key) {
        std::size_t keys = 0;
        const std::size_t blocks = reader_.take_nil() ? 0 : reader_.array();
        for (std::size_t block = 0; block < blocks; ++block) {
            const std::size_t count = reader_.take_nil() ? 0 : reader_.array();
            for (std::size_t i = 0; i < count; ++i) {
                check_bound(++keys, kExtrasMax);
                read_key(static_cast<u32>(block));
            }
        }
        return keys;
    }

    // Read TensorRT-LLM's media keys: only the blocks that have some are recorded.
    [[gnu::noinline]] void read_media_keys() {
        media_blocks_.clear();
        read_block_keys([&](u32 block) {
            media_blocks_.push_back(block);
            reader_.skip();
        });
    }

    [[gnu::noinline]] void read_block_size() {
        const Reader::Int value = reader_.integer();
        if (value.negative || value.bits > kBlockSizeMax) {
            throw Mismatch("is " + std::to_string(static_cast<std::int64_t>(value.bits)) +
                           ": expected 1.." + std::to_string(kBlockSizeMax));
        }
        stored_.block_size = static_cast<u32>(value.bits);
        seen_size_ = true;
    }

    [[gnu::noinline]] void read_extra_keys() {
        batch_.extras.resize(stored_.extras.begin);
        read_block_keys([&](u32 block) {
            Text text;
            reader_.peek() == Type::Str ? void(text = reader_.text()) : reader_.skip();
            batch_.extras.push_back(ExtraKey{block, text});
        });
    }

    void finish() {
        switch (kind_) {
            case Kind::Unknown: ++batch_.unknown; break;
            case Kind::Cleared: {
                const std::size_t tier = medium_ ? 1 + tier_of(medium_) : 0;
                batch_.events.push_back({Event::Kind::Cleared, tier});
                break;
            }
            case Kind::Removed:
                if (!seen_names_) throw Mismatch("BlockRemoved without block_hashes");
                if (seen_copies_ && copies_.count != stored_.names.count) {
                    throw Mismatch("BlockRemoved.remaining_copy_counts has not one count for each name");
                }
                batch_.events.push_back({Event::Kind::Removed, batch_.removed.size()});
                batch_.removed.push_back(Removed{stored_.names, copies_, tier_of(medium_), stored_.group});
                break;
            case Kind::Stored: finish_stored(); break;
        }
    }

    void finish_stored() {
        if (!seen_names_) throw Mismatch("BlockStored without block_hashes");
        if (!seen_tokens_) throw Mismatch("BlockStored without token_ids");
        if (!seen_size_) throw Mismatch("BlockStored without block_size");
        const bool has_no_tokens = stored_.has_no_tokens();
        if (stored_.block_size == 0 && stored_.names.count != 0 && stored_.tokens.count % stored_.names.count == 0) {
            stored_.block_size = static_cast<u32>(stored_.tokens.count / stored_.names.count);
        }
        if (stored_.block_size == 0 && !has_no_tokens) {
            throw Mismatch("BlockStored.block_size is 0: expected 1.." + std::to_string(kBlockSizeMax));
        }
        if (stored_.names.count * stored_.block_size > stored_.tokens.count && !has_no_tokens) {
            throw Mismatch("BlockStored.token_ids has " + std::to_string(stored_.tokens.count) +
                           " ids: expected at least block_hashes x block_size = " + std::to_string(stored_.names.count) +
                           " x " + std::to_string(stored_.block_size));
        }
        stored_.tier = tier_of(medium_);
        if (stored_.lora && stored_.lora->empty()) stored_.lora.reset();
        if (has_skipped_keys_) stored_.skipped.count = 0;  // skipped blocks with media: their tokens do not identify them
        finish_extras();
        if (!stored_.lora && lora_id_ && *lora_id_ != 0) {
            if (batch_.texts.size() == kTextsMax) throw Mismatch("too many adapters without a name in one batch");
            batch_.texts.push_back(std::string("\0lora_id ", 9) + std::to_string(*lora_id_));
            stored_.lora = batch_.texts.back();
        }
        batch_.events.push_back({Event::Kind::Stored, batch_.stored.size()});
        batch_.stored.push_back(stored_);
    }

    // Remove the LoRA name from the extra keys, once for each block, and add a key for each block with media.
    void finish_extras() {
        const auto begin = batch_.extras.begin() + static_cast<std::ptrdiff_t>(stored_.extras.begin);
        u32 lora_dropped_from = ~u32{0};
        const auto is_lora = [&](const ExtraKey& key) {
            if (!stored_.lora || key.text != stored_.lora || lora_dropped_from == key.block) return false;
            lora_dropped_from = key.block;
            return true;
        };
        batch_.extras.erase(std::remove_if(begin, batch_.extras.end(), is_lora), batch_.extras.end());
        if (!text_positions_.empty() && !stored_.has_all_tokens()) {
            throw Mismatch("BlockStored.token_ids has texts and not one name a block");
        }
        for (std::size_t at : text_positions_) media_blocks_.push_back(static_cast<u32>(at / stored_.block_size));
        for (u32 block : media_blocks_) batch_.extras.push_back(ExtraKey{block, {}});
        if (!media_blocks_.empty()) {
            std::stable_sort(batch_.extras.begin() + static_cast<std::ptrdiff_t>(stored_.extras.begin), batch_.extras.end(),
                             [](const ExtraKey& a, const ExtraKey& b) { return a.block < b.block; });
        }
        stored_.extras.count = batch_.extras.size() - stored_.extras.begin;
    }

    Reader reader_;
    const Digester& digester_;
    Batch& batch_;
    Kind kind_ = Kind::Unknown;
    Field field_ = Field::Ignored;  // field that is being read
    Stored stored_;
    std::optional<std::int64_t> lora_id_;
    Text medium_;
    std::vector<std::size_t> text_positions_;  // of texts among the token ids
    std::vector<u32> media_blocks_;            // blocks that media keys name
    Slice copies_;
    bool has_skipped_keys_ = false, seen_copies_ = false;
    bool seen_names_ = false, seen_tokens_ = false, seen_size_ = false;
};

}  // namespace

void Batch::clear() {
    events.clear();
    stored.clear();
    removed.clear();
    names.clear();
    tokens.clear();
    skipped.clear();
    copies.clear();
    extras.clear();
    texts.clear();
    malformed.clear();
    malformed_events = unknown = 0;
}

void decode(const u8* payload, std::size_t size, const Digester& digester, Batch& batch, Cursor& cursor) {
    batch.clear();
    batch.texts.reserve(kTextsMax);
    try {
        Decoder decoder(payload, size, digester, batch);
        cursor.at == 0 || cursor.whole ? decoder.run(cursor, payload) : decoder.find_end(cursor, payload);
    } catch (const std::runtime_error& error) {
        batch.clear();
        batch.report("unreadable event batch of " + std::to_string(size) + " bytes: " + error.what());
        cursor.done = true;
    }
}

u32 tier_of(Text medium) {
    if (!medium) return 0;
    if (*medium == "GPU") return 0;
    std::string upper(*medium);
    std::transform(upper.begin(), upper.end(), upper.begin(), [](unsigned char c) { return std::toupper(c); });
    if (upper == "GPU") return 0;
    if (upper == "CPU" || upper == "CPU_PINNED") return 1;
    if (upper == "STORAGE" || upper == "DISK") return 2;
    return 3;
}

}  // namespace blockcast
