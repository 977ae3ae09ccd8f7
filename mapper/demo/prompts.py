"""The topics, question templates and fixed prompts that the demo's dialogues and judgements start from."""

from __future__ import annotations

import hashlib

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


def topics() -> list[str]:
    return [topic.strip() for line in TOPICS.splitlines() for topic in line.split(";")]


def is_heldout(text: str) -> bool:
    """A fixed tenth of all topics and prompts, by digest, that training never sees."""
    return hashlib.sha256(text.strip().lower().encode()).digest()[0] < 26
