"""RadixTree against its naive twin, and the rules of splitting, locking and evicting."""

import random
from array import array

from kvchat.cache.keys import common_tokens, encode_ids
from kvchat.cache.radix_tree import Node, RadixTree
from support.naive_cache import NaivePrefixCache
from support.soak_sizes import short_and_long


def never_shared(block: int) -> bool:
    return False


def grown_tree(*runs: tuple[list[int], list[int]], block_size: int = 2) -> RadixTree:
    tree = RadixTree(block_size)
    for token_ids, blocks in runs:
        tree.lock(tree.root)
        tree.insert(tree.root, encode_ids(token_ids), blocks)
        tree.unlock(tree.root)
        tree.check()
    return tree


def test_a_match_ends_at_the_last_full_block_both_share() -> None:
    tree = grown_tree(([1, 2, 3, 4, 5, 6], [10, 11, 12]))

    found = tree.match(encode_ids([1, 2, 3, 4, 9, 9]))

    assert found.blocks == (10, 11)
    assert found.head is None


def test_a_match_that_ends_inside_a_block_names_the_block_and_the_shared_tokens() -> None:
    tree = grown_tree(([1, 2, 3, 4, 5, 6, 7, 8], [10, 11]), block_size=4)

    found = tree.match(encode_ids([1, 2, 3, 4, 5, 6, 9]))

    assert found.blocks == (10,)
    assert (found.head, found.head_len) == (11, 2)


def test_known_ids_keep_the_blocks_the_tree_has() -> None:
    tree = grown_tree(([1, 2, 3, 4], [10, 11]))

    result = tree.insert(tree.root, encode_ids([1, 2, 3, 4, 5, 6]), [20, 21, 22])

    assert result.kept == (10, 11, 22)
    tree.check()


def test_splitting_leaves_a_lock_taken_below_the_cut_valid() -> None:
    tree = grown_tree(([1, 2, 3, 4, 5, 6], [10, 11, 12]))
    deep = tree.match(encode_ids([1, 2, 3, 4, 5, 6])).node
    tree.lock(deep)

    tree.match(encode_ids([1, 2, 9, 9]))
    tree.check()

    assert tree.evict(3, never_shared) == []
    tree.unlock(deep)
    assert tree.evict(3, never_shared) == [12, 11, 10]
    tree.check()


def test_eviction_takes_the_least_recently_used_leaf_and_its_last_blocks_first() -> None:
    tree = grown_tree(([1, 1, 2, 2], [10, 11]), ([3, 3, 4, 4], [20, 21]), ([5, 5], [30]))
    tree.match(encode_ids([1, 1, 2, 2]))

    assert tree.evict(1, never_shared) == [21]
    assert tree.evict(2, never_shared) == [20, 30]
    tree.check()
    assert tree.match(encode_ids([1, 1, 2, 2])).blocks == (10, 11)


def test_a_parent_is_never_forgotten_before_its_children() -> None:
    tree = grown_tree(([1, 1, 2, 2], [10, 11]), ([1, 1, 3, 3], [10, 12]))

    order = tree.evict(3, never_shared)

    assert order[-1] == 10
    assert tree.num_blocks == 0


def test_a_shared_block_is_not_evicted_and_neither_is_what_leads_to_it() -> None:
    tree = grown_tree(([1, 1, 2, 2, 3, 3], [10, 11, 12]))

    assert tree.evict(3, lambda block: block == 11) == [12]
    assert tree.evict(3, lambda block: block == 11) == []
    assert tree.evict(3, never_shared) == [11, 10]


def test_a_tail_is_found_and_gives_way_to_the_block_that_contains_it() -> None:
    tree = grown_tree(([1, 2, 3, 4], [10]), block_size=4)
    node = tree.match(encode_ids([1, 2, 3, 4])).node
    tree.lock(node)
    assert tree.insert_tail(node, encode_ids([5, 6]), 11) == (True, [])
    tree.check()

    found = tree.match(encode_ids([1, 2, 3, 4, 5, 6, 7]))
    assert (found.head, found.head_len) == (11, 2)
    assert tree.insert_tail(node, encode_ids([5]), 12) == (False, [])
    assert tree.insert_tail(node, encode_ids([5, 6, 7]), 13) == (True, [11])

    assert tree.insert(node, encode_ids([5, 6, 7, 8]), [14]).displaced == (13,)
    tree.check()


def test_only_the_sole_holder_of_a_leaf_grows_it_in_place() -> None:
    """Two requests once stood at one leaf; the first grew it and the second's end moved with it."""
    tree = grown_tree(([1, 2], [10]))
    node = tree.match(encode_ids([1, 2])).node
    tree.lock(node)
    tree.lock(node)

    first = tree.insert(node, encode_ids([3, 4]), [11])
    second = tree.insert(node, encode_ids([5, 6]), [12])

    assert first.node is not node
    assert tree.match(encode_ids([1, 2, 5, 6])).blocks == (10, 12)
    assert second.node is not first.node
    tree.check()


def test_a_leaf_reached_while_inserting_is_not_grown_under_its_holder() -> None:
    """An insertion from further up once walked into a leaf with one lock, took that lock for its
    own and grew the leaf in place; the real holder then wrote below the wrong tokens."""
    tree = grown_tree(([1, 2], [10]))
    holder = tree.match(encode_ids([1, 2])).node
    tree.lock(holder)
    tree.lock(tree.root)

    tree.insert(tree.root, encode_ids([1, 2, 3, 4]), [20, 21])
    tree.insert(holder, encode_ids([5, 6]), [12])

    assert tree.match(encode_ids([1, 2, 5, 6])).blocks == (10, 12)
    tree.check()


def test_candidates_for_eviction_do_not_grow_without_bound() -> None:
    tree = grown_tree(([1, 2, 3, 4], [10, 11]))

    for _ in range(1000):
        node = tree.match(encode_ids([1, 2, 3, 4])).node
        tree.lock(node)
        tree.unlock(node)

    assert len(tree._candidates) < 100
    tree.check()


def test_common_tokens_counts_whole_tokens() -> None:
    assert common_tokens(encode_ids([1, 2, 3]), encode_ids([1, 2, 4])) == 2
    assert common_tokens(encode_ids([1]), encode_ids([257])) == 0
    assert common_tokens(b"", encode_ids([1])) == 0


@short_and_long(1, 100)
def test_random_actors_agree_with_a_dict_of_prefixes(size: int) -> None:
    """Insert, match, lock, evict at random; blocks found must be those the naive twin knows."""
    for seed in range(size):
        live_beside_a_dict(random.Random(seed + 7))


def live_beside_a_dict(rng: random.Random) -> None:
    tree, naive = RadixTree(4), NaivePrefixCache(4)
    next_block = iter(range(1, 10**9))
    locked: list[tuple[Node, list[int]]] = []
    for _ in range(4000):
        token_ids = [rng.randint(0, 1) for _ in range(rng.randint(0, 24))]
        action = rng.random()
        if action < 0.4:
            blocks = [next(next_block) for _ in range(len(token_ids) // 4)]
            tree.lock(tree.root)
            result = tree.insert(tree.root, encode_ids(token_ids[: len(blocks) * 4]), blocks)
            tree.unlock(tree.root)
            naive.insert(token_ids, blocks)
            assert list(result.kept) == naive.match(token_ids[: len(blocks) * 4])
        elif action < 0.7:
            found = tree.match(encode_ids(token_ids))
            assert list(found.blocks) == naive.match(token_ids)
            assert tree.blocks_of(encode_ids(token_ids)) == list(found.blocks)
            if rng.random() < 0.3:
                tree.lock(found.node)
                locked.append((found.node, list(token_ids[: 4 * len(found.blocks)])))
        elif action < 0.85 and locked:
            tree.unlock(locked.pop(rng.randrange(len(locked)))[0])
        else:
            naive.forget(tree.evict(rng.randint(1, 6), never_shared))
        tree.check()
        for _, prefix in locked:
            assert 4 * len(tree.blocks_of(encode_ids(prefix))) == len(prefix), (
                "a locked prefix was evicted"
            )


def test_a_cut_takes_what_goes_on_from_there_and_nothing_else() -> None:
    rng = random.Random(5)
    for _ in range(200):
        tree, contexts = RadixTree(2), []
        blocks = iter(range(1, 1000))
        for _ in range(6):
            ids = [rng.randrange(2) for _ in range(2 * rng.randrange(1, 7))]
            tree.lock(tree.root)
            known = 2 * len(tree.blocks_of(encode_ids(ids)))
            result = tree.insert(tree.root, encode_ids(ids), [next(blocks) for _ in ids[::2]])
            tree.unlock(tree.root)
            contexts.append((ids, result.kept))
            assert known <= len(ids)
        victim, num_kept = rng.choice(contexts)[0], rng.randrange(4)
        gone = tree.cut(encode_ids(victim), num_kept)

        tree.check()
        beginning = victim[: 2 * num_kept + 2]
        for ids, kept in contexts:
            is_hit = len(beginning) == 2 * num_kept + 2 and ids[: len(beginning)] == beginning
            left = kept[:num_kept] if is_hit else kept
            assert tree.blocks_of(encode_ids(ids)) == list(left)
            assert not set(left) & set(gone)
        assert len(gone) == len(set(gone))


def test_a_cut_leaves_what_is_locked() -> None:
    tree = RadixTree(2)
    tree.lock(tree.root)
    result = tree.insert(tree.root, encode_ids([1, 2, 3, 4]), [1, 2])
    tree.unlock(tree.root)
    tree.lock(result.node)

    assert tree.cut(encode_ids([1, 2, 3, 4]), 0) == []
    assert tree.blocks_of(encode_ids([1, 2, 3, 4])) == [1, 2]
    tree.unlock(result.node)
    assert sorted(tree.cut(encode_ids([1, 2, 3, 4]), 1)) == [2]
    tree.check()


def test_ids_in_one_piece_of_memory_pack_as_a_list_does() -> None:
    """64 waiting requests of 30,000 ids once cost 96 ms a step: every list was packed again."""
    ids = [0, 1, 255, 65_536, 2**31 - 1]

    assert (
        encode_ids(array("i", ids))
        == encode_ids(array("q", ids))
        == encode_ids(ids)
        == encode_ids(tuple(ids))
    )
