"""Questions for measuring drafts, by category: some answers repeat their question."""

_FUNCTION = """\
def total_price(items, discounts):
    total = 0
    for item in items:
        price = item["price"] * item["count"]
        if item["name"] in discounts:
            price = price - price * discounts[item["name"]]
        total = total + price
    return total
"""
_MANUAL = """\
The pump stands in the cellar behind the boiler. Its valve is opened by a quarter turn to the \
left. The filter is cleaned on the first Monday of every third month, with warm water and \
without soap. When the red lamp blinks twice, the pressure is below 1.4 bar: close the valve, \
fill the tank to the upper mark, and open the valve slowly. When it blinks three times, call the \
service under the number on the inside of the lid. The pump runs from six in the morning to ten \
in the evening; the times are set with the small wheel below the display. In winter the outlet \
is covered with the grey cap, which hangs on a chain beside the pump."""

CATEGORIES: dict[str, tuple[str, ...]] = {
    "coding": (
        f"Rewrite this function with type hints and a docstring, and change nothing else:\n\n"
        f"```python\n{_FUNCTION}```",
        "Write a Python class `Stack` with the methods push, pop, peek and is_empty, and a short "
        "test for each of the methods.",
    ),
    "retrieval": (
        f"{_MANUAL}\n\nQuote all sentences that say what to do when the lamp blinks.",
        f"{_MANUAL}\n\nWhen is the filter cleaned, and how? Answer with the words of the text.",
    ),
    "writing": (
        "Write the beginning of a story about a lighthouse keeper who finds a letter in the snow.",
        "Write a friendly message to the neighbours that invites them to a garden party in June.",
    ),
    "reasoning": (
        "A train leaves at 9:40 and takes 2 hours and 35 minutes. A bus leaves at 9:55 and arrives "
        "10 minutes before the train. How long does the bus take? Explain each step.",
        "Anna is older than Ben, Carla is younger than Ben, and Dora is older than Anna. Sort them "
        "by age and say why the order is certain.",
    ),
}
