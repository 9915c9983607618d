"""Places: cities, countries, and spots in a house. Knows words; knows no sentence."""

from demo_recipe.grammar import Words

CITIES = Words("""
    Accra, Adelaide, Amsterdam, Ankara, Antwerp, Athens, Atlanta, Auckland, Austin, Baku, Bangkok,
    Barcelona, Basel, Beijing, Beirut, Belfast, Belgrade, Bergen, Berlin, Bern, Bilbao, Birmingham,
        Bogota,
    Bologna, Boston, Brisbane, Bristol, Brussels, Bucharest, Budapest, Cairo, Calgary, Cambridge,
        Cape Town,
    Cardiff, Casablanca, Chennai, Chicago, Cologne, Copenhagen, Cork, Dakar, Dallas, Delhi, Denver,
        Detroit,
    Dhaka, Dresden, Dubai, Dublin, Durban, Edinburgh, Florence, Frankfurt, Galway, Geneva, Genoa,
        Ghent,
    Glasgow, Graz, Hamburg, Hanoi, Havana, Helsinki, Hobart, Houston, Istanbul, Jakarta,
        Johannesburg,
    Kathmandu, Kiel, Kolkata, Krakow, Kyoto, Lagos, Leeds, Leipzig, Lima, Lisbon, Liverpool,
        Ljubljana,
    London, Lund, Lyon, Madrid, Malmo, Manchester, Manila, Marseille, Melbourne, Mexico City,
        Miami, Milan,
    Minsk, Montreal, Moscow, Mumbai, Munich, Nairobi, Nantes, Naples, New York, Nice, Odessa,
        Osaka, Oslo,
    Ottawa, Oxford, Palermo, Paris, Perth, Phoenix, Porto, Portland, Prague, Quito, Reykjavik,
        Riga, Rome,
    Rotterdam, Salzburg, Santiago, Sapporo, Seattle, Seoul, Seville, Shanghai, Sheffield,
        Singapore, Sofia,
    Stockholm, Stuttgart, Sydney, Taipei, Tallinn, Tampere, Tbilisi, Tokyo, Toronto, Toulouse,
        Trieste,
    Tunis, Turin, Uppsala, Utrecht, Valencia, Vancouver, Venice, Vienna, Vilnius, Warsaw,
        Wellington, York,
    Zagreb, Zurich
""")

COUNTRIES = Words("""
    Argentina, Australia, Austria, Belgium, Bolivia, Brazil, Bulgaria, Cambodia, Canada, Chile,
        China,
    Colombia, Costa Rica, Croatia, Cuba, Cyprus, Denmark, Ecuador, Egypt, England, Estonia,
        Ethiopia,
    Finland, France, Georgia, Germany, Ghana, Greece, Hungary, Iceland, India, Indonesia, Iran,
        Ireland,
    Israel, Italy, Jamaica, Japan, Jordan, Kenya, Korea, Laos, Latvia, Lebanon, Lithuania,
        Madagascar,
    Malaysia, Malta, Mexico, Mongolia, Morocco, Namibia, Nepal, New Zealand, Nigeria, Norway, Oman,
        Pakistan,
    Panama, Peru, Poland, Romania, Rwanda, Scotland, Senegal, Serbia, Slovakia, Slovenia, Spain,
        Sri Lanka,
    Sweden, Switzerland, Taiwan, Tanzania, Thailand, Tunisia, Turkey, Uganda, Ukraine, Uruguay,
        Vietnam,
    Wales, Zambia
""")

SPOTS = Words("""
    in the drawer, on the shelf, under the bed, behind the door, in the kitchen, in the car, on the
        table,
    in the garage, in my bag, in the attic, in the basement, next to the lamp, on top of the fridge,
    in the blue box, under the stairs, in the hallway, on the desk, in my coat, in the bathroom,
    in the top drawer, behind the sofa, in the garden shed, in the green suitcase, on the balcony,
    under the doormat, in the second locker, inside the piano, on the window sill, in the cupboard,
    in the glove box, at the office, at my parents' house, in the laundry room, on the roof,
    in the red folder, beneath the carpet, in the safe, on the nightstand, behind the mirror, in
        the cellar
""")

OUTINGS = Words("""
    the beach, the mountains, the museum, the zoo, the gym, the library, the market, the dentist,
        the park,
    the cinema, the theatre, the lake, the airport, the opera, the supermarket, the doctor, a
        concert,
    a wedding, a conference, a party, the swimming pool, the hairdresser, the harbour, the farm,
    the stadium, the bank, the post office, the castle, the bakery, the bookshop
""")
