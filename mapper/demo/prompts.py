"""The topics, question templates and fixed prompts that the demo's dialogues and judgements start from."""

from __future__ import annotations

import hashlib
import re

TOPICS = """dogs; cats; horses; elephants; whales; honey bees; spiders; owls; penguins; dolphins; frogs; sharks; butterflies; ants
the Sun; the Moon; Mars; Jupiter; black holes; comets; galaxies; gravity; light; sound; electricity; magnets; heat; atoms
water; rain; snow; clouds; wind; volcanoes; earthquakes; rivers; mountains; deserts; forests; oceans; islands; glaciers; caves
bread; cheese; chocolate; coffee; tea; pizza; rice; soup; pasta; apples; bananas; potatoes; salad; honey; ice cream; eggs
football; swimming; running; chess; tennis; cycling; yoga; hiking; fishing; dancing; skiing; basketball; gymnastics
music; the piano; the guitar; painting; photography; poetry; theatre; films; books; museums; architecture; sculpture
computers; the internet; robots; telephones; clocks; bicycles; cars; trains; airplanes; ships; rockets; bridges; television
algebra; fractions; geometry; prime numbers; probability; statistics; multiplication; graphs; triangles; circles
the heart; the brain; sleep; exercise; vitamins; the lungs; bones; muscles; the skin; teeth; the immune system; stress
France; Japan; Brazil; Egypt; India; China; Canada; Italy; Mexico; Australia; Kenya; Germany; Greece; Norway; Peru; Spain
ancient Rome; the pyramids; the Middle Ages; the Renaissance; the Industrial Revolution; the printing press; democracy
money; banks; taxes; trade; jobs; farming; factories; markets; budgets; savings; insurance; small businesses; advertising
friendship; honesty; courage; kindness; patience; happiness; fear; anger; love; family; teamwork; leadership; learning
recycling; solar power; wind power; pollution; climate; plastic; gardens; trees; flowers; seeds; soil; insects; birds
Python programming; variables; loops; functions; lists; databases; websites; passwords; email; operating systems; algorithms
school; homework; exams; teachers; universities; languages; grammar; spelling; writing; reading; history lessons; science lessons
breakfast; cooking; cleaning; shopping; travel; holidays; birthdays; weddings; pets; weather; the seasons; morning routines"""

TEMPLATES = (
    "What is interesting about {}?",
    "Tell me about {}.",
    "Write two sentences about {}.",
    "Explain {} to a ten-year-old.",
    "Why are {} important to people?",
    "Give me three facts about {}.",
    "Write a short poem about {}.",
    "What should a beginner know about {}?",
    "Write a short story about {}.",
    "How would you describe {} in one sentence?",
    "What are common mistakes people make about {}?",
    "List five words related to {}.",
    "I want to learn about {}. Where do I start?",
    "Ask me a question about {} and then answer it.",
    "What is the difference between {} and {other}?",
    "Write a short email to a friend about {}.",
    "Summarise what you know about {}.",
    "How did {} change over time?",
    "What are the advantages and disadvantages of {}?",
    "Give me a simple example that has to do with {}.",
)

FACT_TEMPLATES = (
    "What is the capital of {country}?",
    "Where is {country}?",
    "What language do people speak in {country}?",
    "What is {a} plus {b}?",
    "What is {a} times {b}?",
    "What comes after {a}?",
    "Which is bigger, {a} or {b}?",
    "What colour is {thing}?",
    "What is {thing} used for?",
    "Is {thing} an animal, a plant or an object?",
    "What is the opposite of {adjective}?",
    "Use the word {adjective} in a sentence.",
    "How do you spell {adjective}?",
    "What is {thing} made of?",
    "What is {thing}?",
    "Name three {kind}.",
    "Name a kind of {kind} and describe it.",
    "How many {parts} are there in {whole}?",
    "Which is the {most} in the world?",
    "Why do people {habit}?",
    "Give me a tip on how to {habit} better.",
    "How can I become a better {person}?",
    "What does a {person} do?",
    "Say something kind to a {person}.",
    "Suggest a name for a {person}'s shop.",
    "Write one sentence about {country}.",
    "Write one sentence with the words {thing} and {adjective}.",
)
COUNTRIES = [
    "Japan",
    "Italy",
    "Spain",
    "Germany",
    "Egypt",
    "Kenya",
    "Canada",
    "Brazil",
    "India",
    "China",
    "Greece",
    "Norway",
    "Sweden",
    "Peru",
    "Chile",
    "Portugal",
    "Poland",
    "Turkey",
    "Mexico",
    "Cuba",
    "Ireland",
    "Austria",
    "Thailand",
    "Vietnam",
    "Morocco",
    "Nigeria",
    "Argentina",
    "Russia",
    "Finland",
    "Denmark",
]
THINGS = [
    "grass",
    "a banana",
    "snow",
    "a hammer",
    "a spoon",
    "an umbrella",
    "a tomato",
    "coal",
    "a pencil",
    "a lemon",
    "a window",
    "a clock",
    "a knife",
    "a blanket",
    "a lamp",
    "an orange",
    "a carrot",
    "a mirror",
    "a rope",
    "a ladder",
    "a rose",
    "an oak",
    "a wolf",
    "a shoe",
    "a bottle",
    "a map",
    "a key",
    "a candle",
    "a kettle",
    "a crow",
]
ADJECTIVES = [
    "hot",
    "big",
    "fast",
    "happy",
    "light",
    "early",
    "dark",
    "strong",
    "quiet",
    "heavy",
    "young",
    "rich",
    "hard",
    "wet",
    "empty",
    "brave",
    "beautiful",
    "careful",
    "difficult",
    "famous",
    "gentle",
    "honest",
    "important",
    "necessary",
    "ordinary",
    "possible",
    "serious",
    "strange",
    "useful",
    "weak",
]

KINDS = [
    "vegetables",
    "colours",
    "sports",
    "musical instruments",
    "farm animals",
    "wild animals",
    "birds",
    "fish",
    "trees",
    "flowers",
    "languages",
    "rivers",
    "cities",
    "countries in Europe",
    "countries in Asia",
    "tools",
    "school subjects",
    "board games",
    "clothes",
    "drinks",
    "kinds of weather",
    "jobs",
    "rooms of a house",
    "metals",
    "shapes",
    "feelings",
    "vehicles",
    "insects",
    "spices",
    "dances",
]
# (parts, whole): asked as "How many parts are there in the whole?"
NUMBERS = [
    ("months", "a year"),
    ("hours", "a day"),
    ("minutes", "an hour"),
    ("seconds", "a minute"),
    ("weeks", "a year"),
    ("letters", "the English alphabet"),
    ("players", "a football team"),
    ("strings", "a guitar"),
    ("wheels", "a car"),
    ("years", "a century"),
    ("sides", "a triangle"),
    ("sides", "a square"),
    ("eggs", "a dozen"),
    ("planets", "the solar system"),
    ("continents", "the world"),
    ("centimetres", "a metre"),
    ("grams", "a kilogram"),
    ("bones", "the human body"),
    ("seasons", "a year"),
    ("colours", "a rainbow"),
]
MOSTS = [
    "highest mountain",
    "longest river",
    "largest desert",
    "largest country",
    "smallest country",
    "fastest animal",
    "largest animal",
    "tallest building",
    "hottest place",
    "coldest place",
    "deepest lake",
    "oldest city",
    "most spoken language",
    "largest island",
    "most popular sport",
]
HABITS = [
    "exercise",
    "read books",
    "travel",
    "cook at home",
    "sing",
    "dance",
    "laugh",
    "work",
    "learn languages",
    "save money",
    "drink coffee",
    "keep pets",
    "play games",
    "listen to music",
    "write letters",
    "take photographs",
    "plant trees",
    "study history",
    "swim",
    "relax",
]
PEOPLE = [
    "teacher",
    "student",
    "doctor",
    "nurse",
    "baker",
    "farmer",
    "gardener",
    "pilot",
    "cook",
    "painter",
    "writer",
    "singer",
    "neighbour's child",
    "grandmother",
    "colleague",
    "police officer",
    "carpenter",
    "scientist",
    "librarian",
    "sailor",
]

# Asked as they stand: what a child learns first. None of them is, or asks the same as, a judged prompt.
SIMPLE_QUESTIONS = """What do cows give us? What do hens lay? What do we get from sheep? What does a spider spin? What do rabbits eat?
What does a caterpillar become? What do fish breathe with? How many legs does a spider have? How many legs does a dog have?
How many wings does a bird have? What do birds use to fly? Where do fish live? Where do bears sleep in winter? What do pandas eat?
Which animal has a long trunk? Which animal has a long neck? Which animal barks? Which animal says meow? What is a young dog called?
What is a young cat called? What is a young cow called? Is a whale a fish? Can penguins fly? Do snakes have legs? What do frogs eat?
What is the largest animal in the sea? Which bird cannot fly? What is the king of the animals? Which animal has black and white stripes?
What do we use to see? What do we use to hear? What do we use to smell? How many fingers do people have on one hand? How many eyes do
people have? How many ears does a person have? What do our lungs do? What does the heart do? Why do we eat? Why do we drink water? Why do
we need bones? Why should we brush our teeth? What do we use our teeth for? Which part of the body do we think with? Why do we sweat?
Which month comes after March? Which month is the first of the year? Which day comes after Monday? Which day comes before Sunday? Which
season comes after winter? Which season is the warmest? Which season is the coldest? How many months are there in half a year? How many
days are there in a year? How many days are there in June? How many hours are there in two days? When do we eat breakfast? When is noon?
What comes after the number nine? What is one plus one? What is two plus three? What is ten minus four? What is three times three? What is
half of ten? What is five plus five? What is seven minus two? What is six divided by two? What is the first letter of the alphabet? What is
the last letter of the alphabet? Which number is bigger, three or eight? What shape has three sides? What shape is a ball? What shape has
four equal sides? How many sides does a hexagon have? How many cents are there in a dollar? Count from one to five. Count down from five.
What colour is blood? What colour is milk? What colour are leaves in summer? What colour is the Sun? What colour are strawberries? What
colour is coal? What colour do you get from red and white? What colour do you get from blue and yellow? Which colours are in a traffic
light? Name two colours. What colour is a lemon? What colour is the grass? What colour is a fire engine? What colour is an elephant?
What is the opposite of up? What is the opposite of left? What is the opposite of day? What is the opposite of open? What is the opposite of
full? What is the opposite of old? What is the opposite of slow? What is the opposite of loud? What is the opposite of begin? What is the
opposite of tall? What is the opposite of sad? What is the opposite of good? What is the opposite of wet? What is the opposite of winter?
What falls from clouds? What is ice made of? What happens to ice when it gets warm? What happens to water when it boils? What gives us
light during the day? What do we see in the sky at night? Where does the Sun rise? Where does the Sun set? Why is it dark at night? What is
the Moon? What is a star? What is the Sun? What is a rainbow? What is snow? What is fog? What is thunder? What makes wind? What is a
shadow? What is a desert? What is a forest? What is an island? What is a river? What is a mountain? What is a volcano? What is a lake?
What is sand made of? What is glass made of? What is paper made of? What is bread made of? What is cheese made of? What is butter made of?
What is chocolate made of? What is wool made of? What is a brick made of? What is steel made of? What is a candle made of? What is a
sandwich? What is a fruit? What is a vegetable? What is soup? What is breakfast? What do trees give us? What do roots do? What do leaves
do? What do seeds become? What do flowers smell like? What grows on apple trees? What grows under the ground? Where does wood come from?
Where does milk come from? Where does rain come from? Where does the food in a shop come from? Name three
vegetables. Name three animals. Name three countries. Name two drinks. Name three musical instruments. Name four seasons. Name three pets.
Name three sports. Name two planets. Name three berries. Name three kinds of weather. Name two oceans. Name three cities. Name two shapes.
What is the capital of England? What is the capital of Italy? What is the capital of Spain? What is the capital of Germany? What is the
capital of Russia? What is the capital of China? What is the capital of the United States? In which country is London? In which country is
Rome? In which country is Tokyo? In which country is the Nile? On which continent is Egypt? On which continent is Brazil? Which continent
is the coldest? Which country has the most people? Which is the largest continent? Which is the highest mountain? Which is the longest
river? Which planet has rings? Which planet is the largest? Which planet is closest to the Sun? What moves around the Earth? How many
oceans are there? How many continents are there? How many planets move around the Sun? Which is larger, the Sun or the Moon? Is the Earth
round? What is a planet? What is a country? What is a city? What is a village? What is a map for? What is a flag? What is a king?
What does a doctor do? What does a teacher do? What does a baker make? What does a farmer do? What does a pilot do? What does a firefighter
do? What does a tailor make? Who works in a hospital? Who works in a school? Who flies an airplane? Who grows our food? Who wrote Romeo
and Juliet? Who painted the Mona Lisa? What is a school? What is a library? What is a hospital? What is a museum? What is a shop? What is
a kitchen for? What is a bed for? What is a chair for? What is a key for? What is a clock for? What is an umbrella for? What is a pen for?
What is a phone for? What is a car? What is a train? What is a ship? What is an airplane? What is a bicycle? What is a computer? What is a
camera? What is a letter? What is a newspaper? What is a poem? What is a song? What is a story? What is a friend? What is a family? What is
a birthday? What is a holiday? What is a game? What is money? What is music? What is a language? What is a question? What is a joke?
Say hello. Say good morning. Say thank you. Say goodbye to a friend. Say sorry to a friend. Greet a guest. Welcome a new student. Wish me
luck. Wish me a happy birthday. Invite a friend to dinner. Introduce yourself. Tell me a joke. Tell me something nice. Tell me a fun fact
about whales. Tell me a fun fact about the Moon. Tell me a fun fact about horses. Tell me a fun fact about trees. Tell me a fun fact about
chocolate. Tell me a fun fact about bees. Tell me a fun fact about elephants. Tell me a fun fact about sharks. Tell me a fun fact about owls.
Write one sentence about snow. Write one sentence about the sea. Write one sentence about a cat. Write one sentence about summer. Write one
sentence about school. Write one sentence about music. Write one sentence about a tree. Write one sentence about winter. Write two sentences
about cats. Write two sentences about the sea. Write two sentences about a garden. Write two sentences about birds. Write two sentences about
trains. Write two sentences about horses. Write two sentences about friends. Write three sentences about spring. Suggest a name for a kitten.
Suggest a name for a horse. Suggest a name for a parrot. Suggest a name for a boat. Suggest a name for a cafe. Suggest a name for a baby.
Suggest a gift for a child. Suggest a game for two people. Suggest a book for a child. Suggest a hobby. Suggest a healthy snack. Suggest a
drink for a hot day. Give me a tip for sleeping well. Give me a tip for saving money. Give me a tip for learning a language. Give me a tip for
cooking rice. Give me a tip for a long journey. Give me a tip for making friends. Give me a tip for a job interview. Give me a tip for
staying warm. How can I be a good student? How can I be a good neighbour? How can I be a good parent? How can I be a good listener? How can I
learn to swim? How can I sleep better? How can I save water? How can I help a sad friend? How do I boil an egg? How do I make tea? How do I
plant a seed? How do I wash my hands? How do I stay calm? Why do people laugh? Why do people cry? Why do people dream? Why do people work? Why
do people travel? Why do people read? Why do people eat? Why do birds sing? Why do cats purr? Why do dogs bark? Why do leaves fall? Why do we
go to school? Why do we need friends? Why is the sea salty? Why is exercise good for us? Why is water important?"""

FOLLOW_UPS = (
    "Can you say that more simply?",
    "Thank you! Can you tell me more?",
    "Why is that?",
    "Can you give me an example?",
    "Summarise that in one sentence.",
    "What else should I know?",
    "How can I use that in daily life?",
    "Are you sure?",
    "What would a child ask about this?",
    "Make it shorter, please.",
)

PROSE_OPENINGS = (
    "The history of {} begins",
    "{} can be understood as",
    "Scientists who study {} have found that",
    "For most people, {} means",
    "One morning, while thinking about {},",
    "In this chapter, we look at {}.",
    "The most important thing about {} is",
    "Long ago, before anyone wrote about {},",
)

# Never used for training; the small model's answers to them are judged one by one on its card.
JUDGED_PROMPTS = (
    "What is the capital of France?",
    "Write two sentences about dogs that live on a farm.",
    "What is two plus two?",
    "Name three fruits.",
    "What do bees make?",
    "How many days are there in a week?",
    "Say hello to a new neighbour.",
    "What colour is the sky on a clear day?",
    "Why do people sleep?",
    "Give me a tip for staying healthy.",
    "What is the opposite of cold?",
    "Which planet do we live on?",
    "Write one sentence about rain.",
    "What is a book?",
    "Tell me a fun fact about cats and sleep.",
    "What do plants need to grow?",
    "How can I be a good friend?",
    "What is water made of?",
    "Suggest a name for a puppy.",
    "What is the largest ocean on Earth?",
)

# Words by which a question is known to ask what a judged prompt asks, however it is put.
JUDGED_SUBJECTS = (
    r"capital.*france|france.*capital",
    r"dogs?\b.*\bfarm|farm.*dogs?\b",
    r"two plus two|\b2 ?(\+|plus) ?2\b",
    r"(three|3)( \w+)? fruits",
    r"bees?\b.*\b(make|produce)|honey.*(from|made)|(makes?|produces?) honey",
    r"days.*\bweeks?\b|week.*days",
    r"hello.*neighbou?r",
    r"colou?r.*\bsky|sky.*colou?r|sky.*\bblue|blue.*\bsky",
    r"why.*\bsleep",
    r"tip.*health|(stay|keep).*healthy",
    r"opposite of (\w+ )?(cold|hot)",
    r"planet.*(we|people|humans?) live|live on.*planet|our planet",
    r"sentence about rain\b",
    r"what('s| is| are) (a )?books?\b",
    r"cats?\b.*sleep",
    r"(plants?|trees?|flowers?|seeds?).*need",
    r"good friend",
    r"water.*(made|consist)|(made|consists?) of.*water",
    r"name.*(puppy|dog)\b",
    r"(largest|biggest)( \w+)? ocean|ocean.*(largest|biggest)",
)


def topics() -> list[str]:
    return [topic.strip() for line in TOPICS.splitlines() for topic in line.split(";")]


def simple_questions() -> list[str]:
    return [part.strip() for part in re.findall(r"[^?.]+[?.]", " ".join(SIMPLE_QUESTIONS.split()))]


def is_judged(question: str) -> bool:
    """Whether the question, a short one, asks what one of the judged prompts asks."""
    lower = " ".join(question.lower().split())
    return len(lower) < 80 and any(re.search(subject, lower) for subject in JUDGED_SUBJECTS)


def is_heldout(text: str) -> bool:
    """A fixed tenth of all topics and prompts, by digest, that training never sees."""
    return hashlib.sha256(text.strip().lower().encode()).digest()[0] < 26
