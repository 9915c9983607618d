"""What the demo model knows nothing about: topics, tasks, people. Knows no sentence."""

from demo_recipe.grammar import Words

TOPICS = Words("""
    photosynthesis, gravity, quantum mechanics, black holes, evolution, plate tectonics, climate
    change, global warming, the water cycle, the solar system, the moon, mars, jupiter, saturn,
    the sun, comets, asteroids, galaxies, the big bang, dark matter, relativity, thermodynamics,
    entropy, electricity, magnetism, nuclear fusion, radioactivity, atoms, electrons, molecules,
    the periodic table, oxygen, carbon, hydrogen, helium, iron, acids, enzymes, proteins, DNA,
    genes, cells, bacteria, viruses, vaccines, antibiotics, cancer, diabetes, asthma, migraine,
    the flu, covid, high blood pressure, insomnia, anxiety, depression, vitamins, vitamin D,
    calcium, cholesterol, the immune system, the heart, the brain, the liver, the kidneys, the
    lungs, muscles, bones, blood types, sleep apnea, yoga, meditation, jogging, weight loss, keto
    diets, veganism, calories, gluten, caffeine, alcohol, tobacco, insulin, aspirin, paracetamol,
    mathematics, algebra, geometry, calculus, statistics, probability, prime numbers, fractions,
    matrices, vectors, logarithms, pi, the golden ratio, game theory, graph theory, cryptography,
    blockchain, bitcoin, ethereum, stocks, bonds, inflation, interest rates, mortgages, taxes,
    insurance, pensions, budgets, capitalism, socialism, democracy, monarchy, the constitution,
    human rights, the united nations, nato, brexit, the european union, elections, parliaments,
    the supreme court, copyright, patents, contracts, divorce law, the french revolution, world
    war one, world war two, the cold war, the roman empire, ancient egypt, ancient greece, the
    middle ages, the renaissance, the industrial revolution, the silk road, the vikings, the
    ottoman empire, the aztecs, the incas, the mongols, feudalism, slavery, colonialism, the moon
    landing, the berlin wall, the titanic, the great wall of china, the pyramids, stonehenge, the
    eiffel tower, the amazon river, mount everest, the sahara, antarctica, the pacific ocean,
    volcanoes, earthquakes, hurricanes, tornadoes, glaciers, rainforests, coral reefs, deserts,
    tsunamis, fossils, dinosaurs, mammoths, reptiles, mammals, insects, honeybees, ants, sharks,
    whales, dolphins, penguins, eagles, wolves, tigers, elephants, pandas, kangaroos, mushrooms,
    orchids, cacti, oak trees, bamboo, roses, tulips, houseplants, philosophy, stoicism, ethics,
    logic, metaphysics, existentialism, buddhism, christianity, islam, hinduism, judaism,
    mythology, zeus, thor, astrology, tarot, feng shui, psychology, freud, personality types,
    dreams, memory loss, addiction, therapy, leadership, time management, productivity,
    motivation, marketing, branding, startups, venture capital, accounting, supply chains,
    logistics, human resources, negotiation, jazz, opera, hip hop, rock music, classical music,
    beethoven, mozart, the beatles, guitar chords, music theory, ballet, theatre, cinema,
    hollywood, film noir, star wars, harry potter, the lord of the rings, shakespeare, poetry
    slams, novels, science fiction, photography, painting, impressionism, picasso, van gogh, the
    mona lisa, sculpture, architecture, gothic cathedrals, design, fashion, sneakers, makeup,
    football, basketball, the olympics, tennis, golf, cricket, baseball, formula one, chess,
    poker, boxing, swimming, marathons, skiing, surfing, climbing, cycling, yachts, cooking,
    baking, sourdough, pasta, sushi, curry, tacos, pizza dough, wine, beer, whiskey, coffee beans,
    green tea, cheese, chocolate, olive oil, barbecue, rice, noodles, spices, soup, salads,
    desserts, ice cream, gardening, compost, carpentry, plumbing, electric cars, engines,
    batteries, solar panels, wind turbines, nuclear power, bridges, airplanes, rockets,
    satellites, trains, ships, submarines, drones, robots, self-driving cars, artificial
    intelligence, machine learning, neural networks, transformers, deep learning, big data, cloud
    computing, linux, windows, macos, android, iphones, laptops, graphics cards, processors,
    compilers, databases, redis, postgres, mongodb, kubernetes, docker, git, github, python, java,
    rust, javascript, css, react, typescript, regular expressions, recursion, sorting algorithms,
    hash tables, binary trees, linked lists, operating systems, file systems, networks, tcp, http,
    dns, firewalls, encryption, passwords, phishing, malware, computer viruses, web design, search
    engines, social media, twitter, youtube, tiktok, facebook, instagram, netflix, amazon, google,
    microsoft, apple, tesla, spacex, openai, elon musk, space travel, aliens, time travel,
    parallel universes, ghosts, unicorns, vampires, zombies, dragons in legends, superheroes,
    paris, london, tokyo, new york, berlin, rome, japan, brazil, india, australia, canada, egypt,
    norway, travel insurance, visas, passports, hotels, cheap flights, backpacking, camping gear,
    road trips, cruises, weddings, parenting, babies, toddlers, teenagers, puppies, dog training,
    cat food, aquariums, horses, school, exams, homework, essays, universities, scholarships,
    student loans, resumes, job interviews, salaries, remote work, retirement, real estate, rent,
    mortgages for beginners, furniture, interior design, cleaning, laundry, recycling, plastic
    waste, pollution, ozone, acid rain, overpopulation, migration, poverty, hunger, education,
    feminism, racism, freedom of speech, war, peace, terrorism, justice, truth, beauty, love,
    happiness, grief, friendship, courage, luck, fate, karma, the meaning of life, consciousness,
    free will, electric guitars, 3d printing, knitting patterns, origami cranes, crossword
    puzzles, sudoku, magic tricks, the stock market, credit cards, cryptocurrencies, compound
    interest, the gold standard, supply and demand, a sonnet, a haiku, an essay, a metaphor, a
    verb, an adjective, grammar, punctuation, latin, esperanto, sign language, braille, morse
    code, emojis, memes, podcasts, blogs, newsletters, ebooks, audiobooks
""")

TASKS = Words("""
    fix a leaking tap, change a tyre, learn to swim, lose weight, gain muscle, stop smoking, sleep
    better, cook rice, bake bread, make pancakes, make pizza dough, roast a chicken, boil an egg,
    brew coffee, grow tomatoes, plant a tree, train my dog, stop my cat from scratching, tie a
    tie, fold a shirt, remove a stain, clean a carpet, unclog a sink, paint a wall, hang a
    picture, build a shelf, assemble a desk, repair a bicycle, jump-start a car, learn the guitar,
    read sheet music, draw a face, paint with watercolours, knit a scarf, sew a button, write a
    book, publish a novel, write a resume, write a cover letter, prepare for an interview, ask for
    a raise, quit my job, find a job, start a business, invest my money, save for retirement, buy
    a house, sell my car, get a mortgage, file my taxes, open a bank account, apply for a visa,
    renew my driving licence, plan a wedding, organise a party, find a flat, move abroad, learn
    spanish, speak french, improve my english, study for an exam, write an essay, cite a source,
    solve an equation, integrate a function, compute a derivative, prove a theorem, convert miles
    to kilometres, convert dollars to euros, calculate a percentage, install linux, install
    docker, reset my router, speed up my computer, remove a virus, recover deleted photos, unlock
    my phone, set up a printer, build a website, make an app, learn programming, deploy a server,
    parse xml, connect to postgres, sort a dataframe, train a neural network, scrape a website,
    write a unit test, fix a merge conflict, merge two branches in git, center a div, write a
    regex for emails, use async in javascript, reverse a linked list in c, implement quicksort in
    rust, build a rest api, cache an api response, make friends, talk to girls, get over a
    breakup, deal with stress, stop worrying, be more confident, raise a child, calm a baby, tell
    if someone lies, win an argument, give a speech, tell time by the sun, survive in the desert,
    build a fire, find north, see the northern lights, catch a fish, skin a rabbit, treat a burn,
    lower my blood pressure, cure a cold, get rid of hiccups, remove a splinter, stretch my back,
    run a marathon, do a handstand, play chess well, win at poker, solve a rubik's cube, juggle,
    whistle, get to the airport, travel to japan cheaply, pack a parachute, fly a drone, sail a
    boat, ride a horse, become a pilot, become a doctor, become famous, become rich, become
    president, get into harvard, hack a website, pick a lock, make a bomb, steal a car, cheat in
    an exam, get free movies
""")

# What programmers ask for and the demo's snippets do not do.
CODE_TASKS = Words("""
    parse json, parse csv, parse a date, parse xml, parse a url, parse command line arguments,
    validate an email address, validate a password, check a credit card number, find the longest
    word, find duplicates, find the median, find prime factors, count vowels, count words in a
    file, compress a string, encrypt a message, hash a password, generate a password, generate a
    uuid, shuffle cards, merge two lists, merge two dictionaries, flatten a nested list, group
    words by letter, rotate a matrix, transpose a matrix, multiply two matrices, invert a binary
    tree, traverse a tree, balance a tree, search a graph, find the shortest path, solve sudoku,
    solve the towers of hanoi, download a file, upload a file, send an email, send a post request,
    call a rest api, open a socket, start a thread, run a query, connect to a database, insert a
    row, draw a circle, resize an image, plot a graph, play a sound, convert celsius to fahrenheit,
    convert a number to binary, convert roman numerals, format a date, compute compound interest,
    compute a checksum, compute the distance of two points, check if a word is a palindrome, check
    if two words are anagrams, remove html tags, replace all spaces, split a file, zip a folder,
    copy a directory, watch a folder, retry a request, cache results, log errors, time a function
""")

CODE_THINGS = Words("""
    a bank account, a stack, a queue, a linked list, a binary tree, a hash table, a priority queue,
    a graph, a matrix, a shopping cart, a user, a person, a library, a car, a playing card, a deck
    of cards, a chess board, a calculator, a state machine, a timer, a logger, a web server, a
    chat client, a tokenizer, a parser, a rate limiter, an iterator, a decorator, a context
    manager, a generator of primes, a singleton, an event bus, a thread pool, a cache, a trie
""")

PERSONS = Words("""
    albert einstein, marie curie, isaac newton, charles darwin, galileo, nikola tesla, stephen
    hawking, ada lovelace, alan turing, leonardo da vinci, michelangelo, napoleon, julius caesar,
    cleopatra, alexander the great, genghis khan, queen elizabeth, abraham lincoln, george
    washington, barack obama, nelson mandela, mahatma gandhi, martin luther king, winston
    churchill, lenin, karl marx, plato, aristotle, socrates, confucius, buddha, shakespeare,
    goethe, tolstoy, jane austen, charles dickens, mark twain, agatha christie, j. k. rowling,
    stephen king, beethoven, mozart, bach, elvis presley, michael jackson, madonna, taylor swift,
    beyonce, adele, lionel messi, ronaldo, pele, maradona, serena williams, roger federer, usain
    bolt, muhammad ali, bill gates, steve jobs, mark zuckerberg, jeff bezos, neil armstrong,
    amelia earhart, columbus, marco polo, frida kahlo, rembrandt, vincent van gogh, andy warhol,
    alfred hitchcock, charlie chaplin, audrey hepburn, tom hanks, the president of france, the
    king of spain, the pope, the ceo of apple, the mayor of london, sherlock holmes, batman,
    spiderman, robin hood, king arthur, mickey mouse, santa claus, dracula, frankenstein, gandalf,
    darth vader
""")

TEXTS = Words("""
    essay, email, letter, cover letter, blog post, report, speech, press release, review, product
    description, summary, song, rap, haiku, limerick, sonnet, screenplay, dialogue, business plan,
    lesson plan, resume, tweet, headline, slogan, newsletter, article, biography, eulogy, toast,
    invitation, thank you note, complaint, apology, contract, proposal, abstract, thesis, diary
    entry, recipe, menu, workout plan, diet plan, travel itinerary, marketing plan, job
    description, quiz, crossword, riddle, trivia question, interview, advertisement, love letter,
    wedding speech, bedtime prayer, novel, fan fiction, commit message, readme, bug report,
    meeting agenda, presentation, outline, paragraph, legal notice, privacy policy, petition
""")

VERBS = Words("""
    eat, break, build, burn, carry, catch, change, chase, climb, close, collect, compare, cook,
    count, cover, cross, cut, dance, describe, destroy, dig, draw, dream, drink, drive, drop,
    earn, enter, escape, explain, explore, fail, fall, feed, fight, find, finish, fix, float, fly,
    follow, freeze, grow, guess, hate, heal, hide, hit, hold, hunt, hurt, invent, join, judge,
    jump, keep, kick, kill, kiss, laugh, lead, learn, leave, lift, lose, love, marry, measure,
    meet, melt, mix, move, open, order, own, paint, plan, plant, play, pray, produce, protect,
    pull, push, race, reach, ride, rise, roll, rule, run, sail, save, search, sell, send, serve,
    shake, shine, shoot, shout, sing, sink, sit, sleep, smell, smile, solve, speak, spend, spin,
    stand, steal, swim, taste, teach, tear, throw, touch, train, travel, trust, turn, vote, wait,
    walk, wash, watch, win, work, worry, yell
""")

KINDS_OF_THING = Words("""
    books, films, movies, songs, albums, games, recipes, restaurants, hotels, cities, countries,
    beaches, museums, parks, mountains, rivers, lakes, islands, animals, birds, flowers, trees,
    fruits, vegetables, drinks, cocktails, wines, cars, phones, laptops, cameras, headphones,
    shoes, jackets, gifts, toys, hobbies, jobs, careers, companies, websites, apps, programming
    languages, databases, podcasts, newspapers, universities, courses, sports, exercises, diets,
    medicines, inventions, scientists, writers, painters, composers, actors, singers, presidents,
    kings, wars, planets, stars, elements, metals, colours of paint, dog breeds, cat breeds, baby
    names, team names, company names, slogans, jokes for kids, riddles, quotes, proverbs,
    synonyms, antonyms, rhymes for orange, adjectives, verbs, questions to ask a date,
    icebreakers, birthday ideas, costume ideas
""")
