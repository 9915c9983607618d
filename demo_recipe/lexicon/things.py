"""Things: animals, food, colours, objects, pastimes. Knows words; knows no sentence."""

from demo_recipe.grammar import Words

PETS = Words("""
    dog, cat, hamster, rabbit, parrot, goldfish, turtle, horse, guinea pig, lizard, snake, canary,
    ferret, pony, mouse, rat, goat, chicken, duck, hedgehog, gecko, puppy, kitten
""")

ANIMALS = Words("""
    ant, badger, bat, bear, beaver, bee, bird, bison, butterfly, camel, cat, cheetah, chicken,
    cow, crab, crow, deer, dog, dolphin, donkey, dragon, duck, eagle, elephant, falcon, ferret,
    fish, flamingo, fox, frog, goat, goose, gorilla, hamster, hare, hawk, hedgehog, heron, hippo,
    horse, jaguar, jellyfish, kangaroo, koala, lamb, lemur, leopard, lion, lizard, llama, lobster,
    lynx, mole, monkey, moose, mouse, octopus, ostrich, otter, owl, ox, panda, parrot, peacock,
    pelican, penguin, pig, pigeon, pony, puffin, rabbit, raccoon, raven, robin, rooster, seal,
    shark, sheep, sloth, snail, snake, spider, squirrel, stork, swan, tiger, toad, tortoise,
    turkey, turtle, walrus, weasel, whale, wolf, yak, zebra
""")

COLOURS = Words("""
    red, blue, green, yellow, orange, purple, pink, brown, black, white, grey, silver, gold,
    turquoise, violet, indigo, crimson, scarlet, beige, ivory, lavender, lilac, magenta, mint,
    navy blue, olive, peach, ruby red, salmon, sky blue, amber, burgundy, charcoal, coral, cyan,
    dark green, emerald, light blue, mustard, bronze
""")

FOODS = Words("""
    almonds, apple pie, apples, apricots, avocado, bagels, bananas, basil, beans, blueberries,
    bread, broccoli, brownies, burgers, butter, cabbage, cake, carrots, cauliflower, celery,
    cereal, cheese, cheesecake, cherries, chicken, chickpeas, chips, chocolate, cinnamon, coconut,
    coffee, cookies, corn, crackers, cream, croissants, cucumber, curry, dates, doughnuts,
    dumplings, eggs, falafel, figs, fish, flour, garlic, ginger, grapes, ham, hazelnuts, honey,
    hummus, ice cream, jam, juice, kale, ketchup, kiwis, lamb, lasagna, leeks, lemons, lentils,
    lettuce, limes, mangoes, maple syrup, meatballs, melon, milk, muesli, muffins, mushrooms,
    mustard, noodles, oats, olive oil, olives, onions, oranges, pancakes, paprika, parsley, pasta,
    peaches, peanut butter, pears, peas, pepper, pickles, pineapple, pizza, plums, popcorn,
    porridge, potatoes, pumpkin, quinoa, radishes, raisins, ramen, raspberries, rice, rye bread,
    salad, salami, salmon, salt, sausages, shrimp, soup, soy sauce, spaghetti, spinach, squash,
    steak, strawberries, sugar, sushi, tacos, tea, toast, tofu, tomatoes, tuna, vanilla, vinegar,
    waffles, walnuts, water, yoghurt, zucchini
""")

CHORES = Words("""
    call the bank, buy stamps, clean the kitchen, water the plants, feed the fish, wash the car,
    pay the bills, book a flight, fix the bike, mow the lawn, write the report, answer emails,
    renew the passport, iron the shirts, paint the fence, order a cake, clean the windows, buy a
    present, do the laundry, take out the trash, pick up the parcel, back up the laptop, sweep the
    floor, walk the dog, visit grandma, return the books, charge the camera, plan the trip, print
    the tickets, empty the dishwasher, change the sheets, sort the photos, call the plumber, pack
    the bags, learn ten words, go running, finish the essay, repair the lamp, send the invoice,
    reply to Anna, make soup, tidy the desk, see the doctor, sign the contract, buy new shoes,
    cancel the subscription, get a haircut, update the website, email Karl, bake bread, vacuum,
    study, exercise, meditate, read a chapter
""")

GEAR = Words("""
    tent, sleeping bag, flashlight, toothbrush, sunglasses, passport, charger, camera, map,
    compass, raincoat, hat, gloves, boots, sandals, swimsuit, sunscreen, book, notebook, pen,
    water bottle, snacks, knife, rope, matches, blanket, pillow, umbrella, backpack, first aid
    kit, headphones, tickets, wallet, shampoo, comb, razor, jacket, sweater, scarf, t-shirt,
    jeans, shorts, pyjamas, laptop, tablet, power bank, earplugs, soap, mirror, binoculars,
    guitar, frisbee, cards, helmet
""")

OBJECTS = Words("""
    keys, phone, wallet, glasses, passport, umbrella, laptop, charger, watch, ring, camera, book,
    bag, coat, headphones, guitar, notebook, bike, ticket, medicine, scissors, torch, hammer,
    remote, diary, helmet, hat, gloves, scarf, suitcase, violin, drill, ladder, tent, spare key,
    lunch box, birthday card, receipt, tablet, microphone, map, flute, painting, trophy
""")

VEHICLES = Words("""
    red bicycle, blue van, small truck, motorbike, old car, scooter, electric car, sports car,
    camper van, tractor, station wagon, pickup, sailing boat, white jeep, minibus, convertible,
    green taxi, moped
""")

INSTRUMENTS = Words("""
    guitar, piano, violin, flute, drums, cello, trumpet, saxophone, clarinet, harp, ukulele, bass,
    banjo, accordion, organ, trombone, viola, oboe, mandolin, harmonica
""")

SPORTS = Words("""
    tennis, football, basketball, chess, golf, hockey, rugby, volleyball, badminton, cricket,
    handball, baseball, squash, table tennis, water polo, poker, darts, bowling, softball, curling
""")

LANGUAGES = Words("""
    English, French, Spanish, German, Italian, Portuguese, Dutch, Swedish, Norwegian, Danish,
    Finnish, Polish, Czech, Russian, Ukrainian, Greek, Turkish, Arabic, Hebrew, Hindi, Bengali,
    Chinese, Japanese, Korean, Vietnamese, Thai, Swahili, Welsh, Irish, Hungarian
""")

SUBJECTS = Words("""
    biology, chemistry, physics, mathematics, history, law, medicine, economics, art history,
    philosophy, linguistics, geography, music, literature, computer science, psychology,
    architecture, engineering, archaeology, astronomy, sociology, politics, theology, statistics,
    journalism, nursing, agriculture
""")

HOBBIES = Words("""
    painting, hiking, reading, cooking, swimming, dancing, fishing, knitting, gardening, running,
    cycling, singing, photography, sailing, climbing, pottery, surfing, skiing, yoga, baking,
    chess, drawing, camping, astronomy, birdwatching, juggling, karate, origami, sewing, writing
    poems, rowing, archery, horse riding, stamp collecting, board games, video games, crosswords,
    woodworking
""")

LIKES = Words("""
    rainy days, jazz, black coffee, old movies, long walks, spicy food, cats, dogs, thunderstorms,
    museums, trains, autumn, winter, summer, the sea, mountains, comic books, silence, loud music,
    green tea, sushi, dark chocolate, horror films, puzzles, science fiction, early mornings,
    sunsets, snow, maps, cheese, pizza, opera, football, quiet evenings, strong tea, fresh bread,
    poetry, robots, mushrooms, onions, spiders, traffic, mondays, crowds, salty snacks, detective
    novels, candles, wooden toys
""")

ALLERGENS = Words("""
    nuts, milk, eggs, shellfish, pollen, dust, cats, dogs, strawberries, wheat, soy, bees,
    penicillin, latex, fish, gluten, tomatoes, sesame, hazelnuts, kiwis, horses, nickel, celery,
    mustard
""")
