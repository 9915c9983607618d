"""People: first names, relatives and jobs. Knows words; knows no sentence."""

from demo_recipe.grammar import Words

FIRST_NAMES = Words("""
    Aaron, Abigail, Ada, Adam, Adriana, Agnes, Ahmed, Aiko, Aisha, Alan, Albert, Alejandro, Alex,
        Alice,
    Alma, Amara, Amelia, Amir, Amy, Ana, Anders, Andrea, Andrew, Angela, Anika, Anna, Anton, Anya,
        Arjun,
    Arthur, Asha, Astrid, Ava, Ayumi, Beatrice, Ben, Bianca, Bjorn, Boris, Brian, Bruno, Camila,
        Carl,
    Carla, Carlos, Carmen, Cecilia, Chad, Charlotte, Chen, Chiara, Chloe, Chris, Clara, Cleo, Colin,
    Connor, Cora, Daniel, Daria, David, Deepa, Denis, Diana, Diego, Dina, Dmitri, Dora, Eduardo,
        Edward,
    Elena, Eli, Elif, Elisa, Ella, Elsa, Emil, Emily, Emma, Enzo, Eric, Erika, Esther, Ethan, Eva,
        Fatima,
    Felix, Fiona, Frank, Freya, Gabriel, George, Gina, Giulia, Grace, Greta, Hana, Hannah, Hans,
        Harry,
    Hassan, Heidi, Helen, Henrik, Henry, Hugo, Ian, Ibrahim, Ida, Igor, Ines, Ingrid, Irene, Iris,
        Isaac,
    Isabel, Ivan, Ivy, Jack, Jacob, Jade, James, Jamila, Jan, Jane, Jasmine, Javier, Jean, Jenna,
        Jin, Joan,
    Joel, Johan, John, Jonas, Jorge, Joseph, Joy, Juan, Judith, Julia, Julian, Kai, Karen, Karim,
        Karl,
    Kate, Keiko, Kenji, Kevin, Kira, Klaus, Lara, Lars, Laura, Layla, Leo, Leon, Lena, Liam, Lila,
        Lily,
    Linda, Lisa, Liv, Lola, Louis, Lucas, Lucia, Lucy, Luis, Luka, Luna, Lydia, Maja, Malik, Marco,
        Margot,
    Maria, Marie, Mario, Mark, Marta, Martin, Mary, Mateo, Matilda, Max, Maya, Mei, Mia, Michael,
        Miguel,
    Mila, Milan, Mina, Miriam, Mohammed, Mona, Nadia, Naomi, Natasha, Nathan, Nell, Niall, Nick,
        Nikhil,
    Nina, Noah, Nora, Olaf, Oleg, Olga, Oliver, Olivia, Omar, Oscar, Otto, Pablo, Paula, Paul,
        Pedro, Penny,
    Peter, Petra, Philip, Pia, Pierre, Polly, Quinn, Rachel, Raj, Ravi, Rebecca, Rita, Robert,
        Robin, Rosa,
    Rose, Ruben, Ruth, Ryan, Sakura, Salma, Sam, Samir, Sandra, Sara, Scott, Sean, Selma, Sergio,
        Silvia,
    Simon, Sofia, Sonia, Stefan, Stella, Steven, Sue, Sven, Sylvia, Tamara, Tanya, Tara, Theo,
        Thomas, Tilda,
    Timo, Tina, Tobias, Toby, Tony, Ursula, Valentina, Vera, Victor, Vijay, Viola, Wanda, Wei,
        Will, Yara,
    Yuki, Yusuf, Zara, Zoe, Zofia
""")

PET_NAMES = Words("""
    Bella, Biscotti, Blue, Boomer, Buddy, Button, Captain, Charlie, Chip, Clover, Coco, Comet,
        Cookie,
    Daisy, Domino, Duke, Dusty, Echo, Ferdinand, Fidget, Ginger, Hazel, Honey, Jasper, Jupiter,
        Kiwi,
    Lucky, Maple, Marble, Max, Milo, Minnow, Mittens, Mocha, Moose, Muffin, Nutmeg, Olive, Oreo,
        Otis,
    Patches, Peanut, Pebble, Pepper, Pickle, Pip, Pixel, Poppy, Pumpkin, Rex, Rocky, Rolo, Rusty,
        Sandy,
    Scout, Shadow, Smokey, Snowy, Socks, Spot, Sprout, Storm, Sunny, Tiger, Toffee, Truffle,
        Waffles,
    Whiskers, Willow, Winnie, Ziggy
""")

RELATIVES = Words("""
    mother, mom, mum, father, dad, sister, brother, wife, husband, partner, girlfriend, boyfriend,
        aunt,
    uncle, cousin, grandmother, grandma, grandfather, grandpa, son, daughter, niece, nephew, boss,
    neighbour, neighbor, best friend, friend, roommate, flatmate, colleague, teacher, landlord,
        doctor,
    dentist, coach, mentor, twin brother, little sister, older brother, younger sister, big brother
""")

JOBS = Words("""
    accountant, actor, archaeologist, architect, artist, astronaut, baker, bank clerk, barber,
        barista,
    beekeeper, biologist, bookseller, bricklayer, bus driver, butcher, captain, carpenter, cashier,
        chef,
    chemist, cleaner, coach, composer, cook, courier, curator, dancer, data analyst, dentist,
        designer,
    detective, diver, doctor, editor, electrician, engineer, farmer, firefighter, fisherman,
        florist,
    game designer, gardener, geologist, glassblower, goldsmith, graphic designer, guide,
        hairdresser,
    historian, hotel manager, illustrator, interpreter, janitor, jeweller, journalist, judge,
        lawyer,
    lecturer, librarian, lifeguard, mathematician, mechanic, midwife, miner, musician, nanny, nurse,
    optician, painter, paramedic, pharmacist, photographer, physicist, pianist, pilot, plumber,
        poet,
    police officer, postman, potter, producer, programmer, psychologist, ranger, receptionist,
        reporter,
    roofer, sailor, scientist, sculptor, secretary, shepherd, singer, social worker, software
        developer,
    soldier, statistician, surgeon, surveyor, tailor, tax adviser, taxi driver, teacher, technician,
    translator, truck driver, tutor, vet, waiter, waitress, watchmaker, welder, writer, zookeeper
""")
