"""The code snippets the demo model knows. Knows code and what it is for, not how people ask."""

from dataclasses import dataclass

from demo_recipe.grammar import Phrases


@dataclass(frozen=True, slots=True)
class Snippet:
    """A piece of code; `tasks` are verb phrases, `things` noun phrases for it.

    mark    a pattern every right answer matches
    """

    language: str
    tasks: Phrases
    things: Phrases
    code: str
    about: str
    mark: str


SNIPPETS = (
    Snippet(
        "Python",
        Phrases("""
            (print|say|write|output) hello world
            print (hello|text|a line|a message)
            greet the world
        """),
        Phrases("""
            (a|the) hello world [program]
            a hello program
            a print statement
            a first program
        """),
        'print("Hello, world!")',
        "It prints one line of text.",
        r"print\(",
    ),
    Snippet(
        "Python",
        Phrases("""
            write a for loop
            (make|use) a for loop
            loop over (numbers|a list|a range)
            (print|count) numbers from 0 to 4
            repeat something five times
            iterate over a (list|range)
        """),
        Phrases("a for loop\na [simple] loop\n(loops|a loop over numbers)\na for-loop"),
        "for number in range(5):\n    print(number)",
        "It counts from 0 to 4 and prints each number.",
        "for number in",
    ),
    Snippet(
        "Python",
        Phrases("""
            write a while loop
            (make|use) a while loop
            loop while a condition is true
            count down with while
            repeat until zero
        """),
        Phrases("a while loop\na while-loop\na loop with while\na countdown loop"),
        "count = 3\nwhile count > 0:\n    print(count)\n    count -= 1",
        "It prints 3, 2, 1 and stops at zero.",
        "while count",
    ),
    Snippet(
        "Python",
        Phrases("""
            write an if statement
            (check|test) a condition
            use if and else
            (check|test) if a number is (positive|negative)
            branch on a value
        """),
        Phrases("an if statement\nif and else\nan if-else\na condition\na conditional"),
        'if number > 0:\n    print("positive")\nelse:\n    print("not positive")',
        "It tells whether a number is above zero.",
        "if number",
    ),
    Snippet(
        "Python",
        Phrases("""
            (write|make|define) a function
            (write|make) a function that adds two numbers
            add two numbers
            return a sum
            define a function with two arguments
            sum two numbers in a function
        """),
        Phrases("""
            a function
            a function definition
            a function (that adds|to add|for adding) two numbers
            an add function
            a def
        """),
        "def add(a, b):\n    return a + b",
        "It returns the sum of its two arguments.",
        r"def add",
    ),
    Snippet(
        "Python",
        Phrases("""
            read a [text] file
            open a file
            read (all the|the) lines of a file
            load a [text] file
            print a file
            get the content of a file
        """),
        Phrases("""
            reading a file
            a file reader
            file input
            opening a file
            a program that reads a file
        """),
        'with open("notes.txt") as file:\n    text = file.read()',
        "It reads a whole file into one string and closes it again.",
        r"file\.read",
    ),
    Snippet(
        "Python",
        Phrases("""
            write (to|into) a file
            save text (to|in) a file
            create a file
            store a string in a file
            put text in a file
        """),
        Phrases("""
            writing [to] a file
            a file writer
            file output
            saving a file
            a program that writes a file
        """),
        'with open("notes.txt", "w") as file:\n    file.write("hello")',
        "It writes one word to a file and closes it again.",
        r"file\.write",
    ),
    Snippet(
        "Python",
        Phrases("""
            reverse a string
            turn a string around
            flip a string
            reverse text
            read a string backwards
        """),
        Phrases("""
            string reversal
            a reversed string
            a string reverser
            reversing a string
            a program that reverses a string
        """),
        "text = text[::-1]",
        "The slice walks through the text from its end.",
        r"\[::-1\]",
    ),
    Snippet(
        "Python",
        Phrases("""
            sort a list
            put a list in order
            order a list
            sort (numbers|names|values)
            sort an array
        """),
        Phrases("a sorted list\nsorting\na sort\nlist sorting\na program that sorts a list"),
        "numbers = sorted(numbers)",
        "It makes a new list in ascending order.",
        r"sorted\(",
    ),
    Snippet(
        "Python",
        Phrases("""
            sum a list
            add up a list
            total a list of numbers
            add all (numbers|values) in a list
            get the total of a list
        """),
        Phrases("""
            the sum of a list
            a list total
            summing a list
            the total of a list
            a program that adds up a list
        """),
        "total = sum(numbers)",
        "It adds all numbers of a list.",
        r"sum\(",
    ),
    Snippet(
        "Python",
        Phrases("""
            write a list comprehension
            square (all|the) numbers in a list
            make a list of squares
            build a list in one line
            use a list comprehension
        """),
        Phrases("""
            a list comprehension
            (list comprehensions|a comprehension)
            a list of squares
            a one-line list
        """),
        "squares = [number * number for number in range(10)]",
        "It makes a list of the first ten squares.",
        "for number in range",
    ),
    Snippet(
        "Python",
        Phrases("""
            (make|create|use) a (dictionary|dict)
            map (names to numbers|keys to values)
            store ages by name
            look up a value by key
            use key value pairs
        """),
        Phrases("""
            a (dictionary|dict)
            (dictionaries|dicts)
            a key value map
            a lookup table
            a mapping
        """),
        'ages = {"Ada": 36, "Alan": 41}\nprint(ages["Ada"])',
        "It stores two ages by name and looks one up.",
        r"ages\[",
    ),
    Snippet(
        "Python",
        Phrases("""
            (write|make|define|create) a class
            define my own type
            make an object
            write a class with a method
            create an object
        """),
        Phrases("a class\na [simple] class definition\na class with a method\n(classes|an object)"),
        "class Dog:\n    def speak(self):\n        return \"woof\"",
        "It defines a class with one method.",
        "class Dog",
    ),
    Snippet(
        "Python",
        Phrases("""
            (compute|calculate) a factorial
            write a factorial function
            get the factorial of a number
            multiply all numbers up to n
            use recursion
        """),
        Phrases("""
            a factorial [function]
            the factorial
            (recursion|a recursive function)
            a factorial program
        """),
        "def factorial(n):\n    return 1 if n < 2 else n * factorial(n - 1)",
        "The function calls itself with a smaller number until it reaches 1.",
        r"factorial\(",
    ),
    Snippet(
        "Python",
        Phrases("""
            (write|solve|program|code) fizzbuzz
            play fizzbuzz
            print fizz and buzz
            do the fizzbuzz task
        """),
        Phrases("fizzbuzz\na fizzbuzz program\nfizz buzz\nthe fizzbuzz game"),
        'for n in range(1, 16):\n    print("Fizz" * (n % 3 == 0) + "Buzz" * (n % 5 == 0) or n)',
        "It prints Fizz for multiples of 3, Buzz for multiples of 5, else the number.",
        "Fizz",
    ),
    Snippet(
        "Python",
        Phrases("""
            catch an (error|exception)
            handle an (error|exception)
            use try and except
            deal with errors
            convert text to a number safely
        """),
        Phrases("""
            try and except
            (error|exception) handling
            a try block
            a try-except
            catching errors
        """),
        'try:\n    number = int(text)\nexcept ValueError:\n    number = 0',
        "It uses zero if the text is not a number.",
        "except",
    ),
    Snippet(
        "Python",
        Phrases("""
            (get|make|draw|pick) a random number
            roll a die
            throw (a die|dice)
            use random
            pick a number at random
        """),
        Phrases("a random number\na random number generator\na dice roll\na die roller"),
        "import random\n\nnumber = random.randint(1, 6)",
        "It draws a whole number from 1 to 6.",
        "random",
    ),
    Snippet(
        "Bash",
        Phrases("""
            (write a for loop|loop) over files
            loop over (all files|text files)
            print all file names
            do something with every file
            iterate over files
        """),
        Phrases("a for loop\na loop\na loop over files\na file loop"),
        'for file in *.txt; do\n    echo "$file"\ndone',
        "It prints the name of every text file here.",
        "for file in",
    ),
    Snippet(
        "JavaScript",
        Phrases("""
            (print|say|log|write) hello world
            print (to the console|text|a message)
            log a message
            write to the console
        """),
        Phrases("(a|the) hello world [program]\na hello program\na log statement\na first program"),
        'console.log("Hello, world!");',
        "It prints one line to the console.",
        "console",
    ),
    Snippet(
        "JavaScript",
        Phrases("""
            (write|make|define) a function
            add two numbers
            (write|make) a function that adds two numbers
            return a sum
            define an add function
        """),
        Phrases("""
            a function
            a function that adds two numbers
            an add function
            a function definition
            an arrow function
        """),
        "const add = (a, b) => a + b;",
        "It returns the sum of its two arguments.",
        "const add",
    ),
    Snippet(
        "HTML",
        Phrases("""
            (make|write|create|build) a [web] page
            make a (simple|small|minimal) page
            write a website
            show a heading
            make a hello page
        """),
        Phrases("""
            a [web] page
            a (simple|minimal|small) page
            a hello world page
            a page with a heading
            a skeleton
        """),
        "<!doctype html>\n<title>Hello</title>\n<h1>Hello, world!</h1>",
        "It is a page with a title and one heading.",
        "<h1>",
    ),
    Snippet(
        "SQL",
        Phrases("""
            (get|select|read) all rows (of|from) a table
            select from a table
            query a table
            list all users
            read a table
        """),
        Phrases("a [simple] query\na select [statement]\na table query\nselecting rows"),
        "SELECT * FROM users ORDER BY name;",
        "It reads all users in the order of their names.",
        "select",
    ),
)  # fmt: skip
