// Prompts in flight, as digests of the boundaries they will leave behind. Owns who promised which boundary, counted.
#pragma once

#include <vector>

#include "table.hpp"

namespace blockcast {

class Holder;

// digest -> the holders that will have it, with a count each.
class Promises {
public:
    void add(u64 key, const Holder* holder) {
        Entry* entry = find(key);
        if (entry == nullptr) {
            const u32 link = links_.allocate();
            links_[link] = Link{holder, 1, 0};
            table_.insert(Entry{key, link, 0});
            return;
        }
        for (u32 at = entry->head; at != 0; at = links_[at].next) {
            if (links_[at].holder == holder) {
                ++links_[at].count;
                return;
            }
        }
        const u32 link = links_.allocate();
        links_[link] = Link{holder, 1, entry->head};
        entry->head = link;
    }

    void remove(u64 key, const Holder* holder) {
        Entry* entry = find(key);
        if (entry == nullptr) return;
        for (u32 before = 0, at = entry->head; at != 0; before = at, at = links_[at].next) {
            if (links_[at].holder != holder) continue;
            if (--links_[at].count > 0) return;
            const u32 after = links_[at].next;
            links_.free(at);
            if (before != 0) {
                links_[before].next = after;
            } else if (after != 0) {
                entry->head = after;
            } else {
                table_.erase(entry);
            }
            return;
        }
    }

    template <class Visit>
    void each(u64 key, Visit visit) const {
        const Entry* entry = find(key);
        for (u32 at = entry == nullptr ? 0 : entry->head; at != 0; at = links_[at].next) visit(links_[at].holder);
    }

    bool has(u64 key, const Holder* holder) const {
        bool found = false;
        each(key, [&](const Holder* it) { found = found || it == holder; });
        return found;
    }

    bool empty() const { return table_.size() == 0; }
    std::size_t bytes() const { return table_.bytes() + links_.bytes(); }

private:
    struct Entry {
        u64 key;
        u32 head, unused;
    };
    struct Link {
        const Holder* holder;
        u32 count, next;
    };
    struct Traits {
        static u32 hash_of(u64 key) { return static_cast<u32>((key * 0x9E3779B97F4A7C15ull) >> 32); }
        static u32 hash(const Entry& entry) { return hash_of(entry.key); }
    };

    Entry* find(u64 key) const {
        return table_.find(Traits::hash_of(key), [&](const Entry& entry) { return entry.key == key; });
    }

    SegmentedTable<Entry, Traits> table_;
    Pool<Link> links_;
};

}  // namespace blockcast
