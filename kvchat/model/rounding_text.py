"""A text for measurements: prose, a conversation, numbers and code in several languages."""

TEXT = '''\
The old lighthouse keeper climbed the stairs every evening, although his knees had begun to complain
years ago. From the gallery he could see the harbour, the two fishing boats that were left, and the
road along which his daughter would come on Sunday. She worked in the city, in a hospital with four
hundred beds, and she brought newspapers, oranges and questions that he did not like to answer.

User: What is the capital of France, and how many people live there?
Assistant: The capital of France is Paris. About 2.1 million people live in the city itself, and
more than 12 million in the whole region.
User: Write a function that returns the largest number of a list.
Assistant: Here it is:

```python
def largest(numbers):
    """Return the largest number, None for an empty list."""
    result = None
    for number in numbers:
        if result is None or number > result:
            result = number
    return result
```

It reads the list once. For the list [3, 17, 5] it returns 17.

Der Zug nach Hamburg fährt um 14:35 Uhr von Gleis 7 ab und kommt gegen Abend an. La bibliothèque est
fermée le lundi, mais elle ouvre tôt le samedi. Water boils at 100 degrees Celsius at sea level; on
a mountain of 3,000 metres it boils at about 90 degrees, because the pressure is lower there.
'''
