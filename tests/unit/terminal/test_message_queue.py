"""Messages typed while the model is busy."""

import random

from kvchat.terminal.unsent import MessageQueue


def _queue(*texts: str) -> MessageQueue:
    queue = MessageQueue()
    for text in texts:
        queue.add(text)
    return queue


def test_messages_are_taken_in_order() -> None:
    queue = _queue("a", "b")

    assert [queue.take(), queue.take()] == ["a", "b"]
    assert not queue.has_next


def test_an_edited_message_keeps_its_place() -> None:
    queue = _queue("a", "b", "c")

    assert queue.edit_previous("") == "c"
    assert queue.edit_previous("c") == "b"
    assert queue.edited_index == 1
    queue.add("B")

    assert queue.texts == ("a", "B", "c")
    assert queue.edited_index is None


def test_moving_on_keeps_what_was_changed() -> None:
    queue = _queue("a", "b")
    queue.edit_previous("")

    assert queue.edit_previous("b!") == "a"
    assert queue.edit_next("a!") == "b!"
    assert queue.edit_next("b!!") == "", "after the last one the prompt is empty"
    assert queue.texts == ("a!", "b!!")


def test_the_first_message_is_not_sent_while_it_is_edited() -> None:
    queue = _queue("a", "b")
    queue.edit_previous("")
    assert queue.has_next, "the second is edited, the first may go"
    assert queue.take() == "a"
    assert not queue.has_next

    queue.stop_editing()
    assert queue.has_next


def test_editing_a_message_to_nothing_removes_it() -> None:
    queue = _queue("a", "b")
    queue.edit_previous("")
    queue.add("  ")

    assert queue.texts == ("a",)


def test_there_is_nothing_before_the_first_and_nothing_to_leave_without_editing() -> None:
    queue = _queue("a")

    assert queue.edit_next("") is None
    assert queue.edit_previous("") == "a"
    assert queue.edit_previous("a") is None
    assert queue.texts == ("a",)
    assert queue.clear() == ("a",)
    assert queue.edit_previous("") is None


def test_whatever_keys_are_pressed_no_message_is_lost_or_doubled() -> None:
    rng = random.Random(4)
    for _ in range(200):
        queue, prompt, typed, taken = MessageQueue(), "", 0, []
        for _ in range(30):
            action = rng.choice(["type", "up", "down", "take", "stop"])
            if action == "type":
                if queue.edited_index is None:
                    prompt, typed = str(typed), typed + 1
                queue.add(prompt)
                prompt = ""
            elif action in ("up", "down"):
                move = queue.edit_previous if action == "up" else queue.edit_next
                text = move(prompt)
                prompt = prompt if text is None else text
            elif action == "take" and queue.has_next:
                taken.append(queue.take())
            elif action == "stop":
                queue.stop_editing()
                prompt = ""
        assert taken + list(queue.texts) == [str(number) for number in range(typed)]


def test_what_an_earlier_process_did_not_send_is_offered_one_after_another() -> None:
    queue = _queue("typed now")
    queue.offer(["first", "second"])

    assert queue.unsent == ("first", "second", "typed now")
    assert queue.next_offer() == "first"
    assert queue.next_offer() == "first", "a command was typed in its place: it comes back"
    assert queue.unsent == ("first", "second", "typed now")
    queue.drop_offer()
    assert queue.unsent == ("second", "typed now")
    assert queue.take() == "typed now", "none is sent by itself"
    assert queue.next_offer() == "second"
    queue.drop_offer()
    assert queue.next_offer() is None
    assert queue.unsent == ()


def test_clearing_returns_what_is_not_in_the_prompt() -> None:
    queue = _queue("typed now")
    queue.offer(["first", "second"])
    queue.next_offer()

    assert queue.clear() == ("second", "typed now")
    assert queue.unsent == ()
