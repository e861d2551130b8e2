"""A grammar that writes short children's stories from a seed; it is data and an expander, not a language model.

A story is an opening, one plot and a closing. A plot is a list of beats, a beat is a tuple of alternative templates.
In a template ``[a|b]`` is a choice (it nests), ``{A}`` or ``{A.he}`` is a form of a slot. All slots of a story (hero,
friend, grown-up, things, places) are drawn once, so names, pronouns and things stay the same through the story.

``story(seed)`` is deterministic, and the same on every Python version: it uses nothing but ``Random.random``, which the
standard library promises to keep.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
Slot = dict[str, str]
Beat = tuple[str, ...]

PARAGRAPH: Beat = ("\n\n",)

# --------------------------------------------------------------------------------------------------------- word lists


def words(text: str, separator: str | None = None) -> tuple[str, ...]:
    return tuple(text.split(separator))


GIRLS = words(
    "Lily Anna Mia Emma Lucy Rosa Nora Ella Ruby Zoe Sara Maya Clara Ivy Grace Amy Jane Molly Nina Tess Hana Leila "
    "Alice Julia Daisy Kate Polly Wendy Olga Priya"
)
BOYS = words(
    "Tom Ben Max Sam Leo Jack Tim Noah Finn Oscar Adam Luke Hugo Milo Paul Omar Theo Nick Ravi Eli Peter Charlie Henry "
    "Joe David Oliver Simon Kenji Ivan Felix"
)
PET_NAMES_OF_ALL = "Pip Momo Coco Pepper Sunny Button Bubbles Nibbles Snowy Pebble Mossy Sandy"
PET_NAMES = {
    "she": words(f"{PET_NAMES_OF_ALL} Dot Fern Hazel Tilly Clover Olive Honey Bella Poppy Misty Luna Holly"),
    "he": words(f"{PET_NAMES_OF_ALL} Bruno Rusty Patch Rocky Toby Buddy Biscuit Ziggy Teddy Oscar Chip Waffles"),
}
# Any start, middle and end must make a name fit for children; see the test of invented names.
SYLLABLES_START = words(
    "Ba Be Bo Da De Do Fi Ka Ke Ki La Le Lo Lu Ma Me Mi Na Ne No Pa Ra Ri Ro Sa Se Ta Te Ti Va Vi Wi Za Zo Zu"
)
SYLLABLES_MIDDLE = words("la ra mi no ri lo be da ni vi sa to lu rri")
SYLLABLES_END = {"she": words("na la ria lia ssa nda ra mi"), "he": words("no ro lo vin bert rto ndo rro")}

# kind, adjectives, young word
ANIMALS = (
    ("rabbit", ("white", "brown", "gray")),
    ("fox", ("red", "clever")),
    ("bear", ("brown", "big")),
    ("mouse", ("gray", "tiny")),
    ("frog", ("green", "round")),
    ("bird", ("blue", "yellow")),
    ("duck", ("yellow", "white")),
    ("owl", ("gray", "wise")),
    ("turtle", ("green", "slow")),
    ("squirrel", ("red", "quick")),
    ("cat", ("black", "white", "orange")),
    ("dog", ("brown", "spotted")),
    ("pig", ("pink", "round")),
    ("cow", ("spotted", "brown")),
    ("sheep", ("white", "fluffy")),
    ("goat", ("white", "black")),
    ("pony", ("brown", "white")),
    ("elephant", ("gray", "big")),
    ("lion", ("golden", "young")),
    ("monkey", ("brown", "funny")),
    ("hedgehog", ("brown", "round")),
    ("beaver", ("brown", "busy")),
    ("dragon", ("green", "purple")),
    ("robot", ("silver", "blue")),
    ("penguin", ("round", "small")),
    ("kitten", ("gray", "fluffy")),
    ("puppy", ("white", "brown")),
)
TRAITS = words("kind brave shy curious happy clever quiet funny gentle busy cheerful friendly polite")

GROWN_UPS = (
    ("mother", "Mom", "she"),
    ("mom", "Mom", "she"),
    ("father", "Dad", "he"),
    ("dad", "Dad", "he"),
    ("grandma", "Grandma", "she"),
    ("grandpa", "Grandpa", "he"),
    ("aunt", "Aunt Rose", "she"),
    ("uncle", "Uncle Bill", "he"),
)

# noun, adjectives, what the owner did with it, where it could be carried off or hidden
TOYS = (
    ("ball", ("red", "blue", "big", "shiny", "round", "new"), "[bounced|threw|kicked] it [all day|high and low]"),
    ("kite", ("red", "yellow", "big", "long", "new"), "flew it [in the wind|high in the sky]"),
    ("doll", ("pretty", "little", "old", "soft"), "[hugged|dressed] it every day"),
    ("drum", ("big", "red", "loud", "little"), "played it [every day|loudly]"),
    ("toy car", ("red", "fast", "blue", "little"), "raced it across the floor"),
    ("toy boat", ("little", "white", "blue", "wooden"), "sailed it on the water"),
    ("toy train", ("long", "green", "wooden", "shiny"), "pulled it through the house"),
    ("teddy bear", ("soft", "brown", "old", "big"), "slept with it every night"),
    ("hat", ("red", "warm", "funny", "tall", "green"), "wore it every day"),
    ("scarf", ("warm", "long", "blue", "soft"), "wore it on cold days"),
    ("book", ("big", "old", "thick", "new"), "read it [every night|under a tree]"),
    ("whistle", ("silver", "small", "loud"), "blew it [every morning|all day]"),
    ("balloon", ("red", "big", "yellow", "round"), "held it by its long string"),
    ("umbrella", ("yellow", "big", "red", "old"), "carried it on rainy days"),
    ("wagon", ("red", "little", "wooden", "old"), "pulled it up and down the road"),
    ("blanket", ("soft", "blue", "warm", "old"), "took it everywhere"),
)
TREASURES = (
    ("shell", ("white", "pink", "pretty", "tiny")),
    ("coin", ("gold", "shiny", "old", "silver")),
    ("key", ("small", "old", "golden", "rusty")),
    ("feather", ("blue", "long", "white", "soft")),
    ("stone", ("smooth", "round", "shiny", "green")),
    ("button", ("red", "round", "shiny", "big")),
    ("bell", ("little", "silver", "golden", "old")),
    ("map", ("old", "secret", "yellow", "strange")),
    ("box", ("wooden", "little", "locked", "strange")),
    ("ring", ("gold", "tiny", "shiny", "silver")),
    ("candle", ("red", "long", "white", "silver")),
    ("lamp", ("old", "small", "golden", "dusty")),
)
FOODS = words("cookies bread soup honey apples berries cheese pancakes nuts carrots pie grapes")

# noun, preposition, three places to look in
PLACES = (
    ("park", "in", ("under the bench", "behind the slide", "near the pond")),
    ("forest", "in", ("under a tall tree", "behind a rock", "in the soft moss")),
    ("garden", "in", ("behind the roses", "under the apple tree", "between the carrots")),
    ("meadow", "in", ("in the tall grass", "among the flowers", "near the old fence")),
    ("beach", "at", ("in the sand", "behind a big rock", "near the waves")),
    ("farm", "on", ("in the hay", "behind the barn", "next to the well")),
    ("hill", "on", ("behind a bush", "under a big stone", "in the long grass")),
    ("river", "by", ("under the bridge", "between the reeds", "behind a log")),
    ("lake", "by", ("near the boats", "under the willow tree", "between the stones")),
    ("market", "at", ("under a table", "behind the fruit baskets", "near the flower shop")),
    ("school", "at", ("under the desk", "behind the door", "near the window")),
    ("village", "in", ("behind the bakery", "near the fountain", "under the old bridge")),
    ("barn", "in", ("behind a bucket", "under the straw", "next to the ladder")),
    ("castle", "in", ("under the stairs", "behind the big door", "next to the throne")),
    ("playground", "at", ("under the swing", "behind the slide", "in the sandbox")),
    ("library", "in", ("under the table", "behind the shelves", "next to the big chair")),
)
HOMES = (
    "in a small house [near the forest|by the sea|at the edge of the village|on a green hill]",
    "in a little village [by a river|under a mountain|near the sea|far away]",
    "in a cozy [house|home] with {A.his} {M.role}",
    "on a [small|quiet|big] farm [with many animals|near a lake|behind the hills]",
    "in a [big|busy|noisy] town [by the sea|full of people|with a tall clock tower]",
    "near a [deep|dark|green|quiet] forest",
    "next to a [wide|blue|little|quiet] river",
)
TIMES = words(
    "one day|one morning|one sunny day|one afternoon|one warm day|one rainy morning|one summer day|one cold morning|"
    "one spring morning|one windy day|early one morning|one Saturday|one quiet afternoon|one bright morning",
    "|",
)

# base form, what went wrong, what worked in the end
SKILLS = (
    (
        "ride a bike",
        "the bike [wobbled|tipped over] and {A} fell [on the grass|down]",
        "rode all the way down the road",
    ),
    ("swim", "{A} [splashed and splashed|kicked hard] but went nowhere", "swam all the way across the pond"),
    ("whistle", "only air came out of {A.his} mouth", "whistled a whole song"),
    ("skate", "{A.his} feet slid away and {A.he} [sat down hard|fell on the ice]", "skated in a big circle"),
    ("paint", "the paint [ran down|dripped on] the paper and made a mess", "painted a beautiful rainbow"),
    ("climb a tree", "{A} slipped and slid back down", "climbed up to the highest branch"),
    ("jump rope", "the rope [hit|caught] {A.his} feet", "jumped twenty times in a row"),
    ("dance", "{A} stepped on {A.his} own feet", "danced across the whole room"),
    ("play the flute", "the flute made a [terrible|funny] sound", "played a sweet song"),
    ("catch a ball", "the ball [fell to the ground|rolled away]", "caught the ball with both hands"),
    ("bake bread", "the bread came out [black|hard as a stone]", "baked a soft, warm loaf"),
    ("juggle", "all the apples fell on the floor", "kept three apples in the air"),
)
FEARS = (
    ("the dark", "the shadows on the wall looked like [monsters|big animals]",
     "lit a small lamp, and the monsters were only [coats|chairs]", "the night was [quiet and soft|full of stars]"),
    ("thunder", "every loud boom made {A.him} [hide under the bed|shake]",
     "counted the seconds between the light and the boom", "thunder was only [noise|the sky clapping]"),
    ("deep water", "the water looked [dark and cold|very deep]",
     "held hands and stepped in slowly, one foot at a time", "the water was [fun|warm and gentle]"),
    ("high places", "{A.his} legs shook when {A.he} looked down",
     "climbed one step at a time and did not look down", "the view from the top was [beautiful|wonderful]"),
    ("big dogs", "they barked so loudly",
     "let a big dog sniff {A.his} hand, and it wagged its tail", "big dogs could be [gentle|good friends]"),
    ("the old bridge", "it creaked and moved in the wind",
     "walked across together, slowly and carefully", "the old bridge was [strong|safe]"),
    ("new people", "{A.he} never knew what to say to them",
     "said hello together, and everyone smiled back", "new people could become [friends|good friends]"),
)  # fmt: skip
DISHES = (
    ("cake", "a", ("flour", "sugar", "milk", "butter", "honey")),
    ("soup", "a pot of", ("carrots", "potatoes", "salt", "onions", "beans")),
    ("pie", "a", ("apples", "butter", "sugar", "berries", "flour")),
    ("pancakes", "some", ("milk", "flour", "butter", "honey", "sugar")),
    ("bread", "some", ("flour", "salt", "butter", "seeds", "milk")),
)
# thing, made of, what broke it, the fix
BUILDS = (
    ("tower", "blocks", "it was too tall and it fell down", "made the bottom wider"),
    ("sandcastle", "wet sand", "a big wave washed it away", "moved farther from the water"),
    ("snowman", "fresh snow", "its head rolled off", "made a bigger body and a smaller head"),
    ("tree house", "old boards", "a board broke with a loud crack", "used thicker boards and more nails"),
    ("raft", "logs", "the logs floated apart", "tied the logs with a strong rope"),
    ("fort", "pillows and blankets", "the roof fell in", "put a long stick in the middle"),
    ("bridge", "stones and sticks", "the water carried the sticks away", "used bigger stones"),
    ("birdhouse", "small pieces of wood", "the roof came off", "used stronger glue"),
)
PLANTS = (
    ("sunflower", "grew taller than the fence"), ("pumpkin", "grew as big as a chair"),
    ("tomato plant", "was full of red tomatoes"), ("rose bush", "was covered with pink roses"),
    ("bean plant", "climbed up to the window"),    ("strawberry plant", "was full of sweet strawberries"),
)  # fmt: skip
CONTESTS = (
    ("race", "ran as fast as {A.he} could", "tripped over a root and fell"),
    ("swimming race", "swam as fast as {A.he} could", "got a cramp and could not go on"),
    ("boat race", "rowed with all {A.his} strength", "lost an oar in the water"),
    ("sled race", "raced down the hill", "crashed into a pile of snow"),
)
NOISES = (
    ("tap, tap, tap", "a branch was knocking on the window", "the wind was playing with the branch"),
    ("hoo, hoo, hoo", "an owl was sitting in the old tree", "the owl was singing to the moon"),
    ("scratch, scratch", "a little mouse was looking for crumbs", "the mouse was only hungry"),
    ("meow, meow", "a lost kitten was sitting at the door", "the kitten only wanted to come in"),
    ("drip, drip, drip", "water was dripping into a bucket", "the rain was coming through the roof"),
    ("creak, creak", "the garden gate was moving in the wind", "nobody had closed the gate"),
)
MAGIC = (
    ("a golden fish", "the fish", "[jumped out of the water|swam up to {A.him}]"),
    ("a tiny fairy", "the fairy", "[flew out of a flower|sat down on {A.his} hand]"),
    ("an old wizard", "the wizard", "[stepped out from behind a tree|came down the road]"),
    ("a talking star", "the star", "[fell softly from the sky|landed at {A.his} feet]"),
    ("a silver bird", "the bird", "[landed on a branch|came down from the clouds]"),
)
# young animal, home, sound, grown animal
YOUNG = (
    ("chick", "hen house on the farm", "chirp", "hen"), ("duckling", "pond behind the hill", "quack", "duck"),
    ("lamb", "farm across the field", "cry", "sheep"), ("kitten", "house with the blue door", "meow", "cat"),
    ("puppy", "bakery in the village", "bark", "dog"), ("owl", "hole in the old oak tree", "hoot", "owl"),
    ("bunny", "little hole under the hedge", "squeak", "rabbit"), ("bird", "nest in the tall tree", "chirp", "bird"),
)  # fmt: skip

# ----------------------------------------------------------------------------------------------------------- openings

# Openings that set the scene; the plot then begins with a time ("One day, ...").
OPENINGS_CALM: Beat = (
    "Once upon a time, there was {A.intro}. {A.He} lived {home}.",
    "Once upon a time, there was {A.intro} who lived {home}.",
    "Once upon a time, {home}, there lived {A.intro}.",
    "Once upon a time, there lived {A.intro}. {A.He} was [very|always] {A.trait} and [loved|liked] the sun.",
    "Once there was {A.intro}. Everyone [knew|said] that {A} was {A.trait}.",
    "Once, long ago, there lived {A.intro} {home}.",
    "There was once {A.intro}. {A.He} was {A.trait}, and {A.he} loved {A.his} {M.role} very much.",
    "There was {A.intro} who [loved|liked] to [play outside|sing|explore|laugh|help others|tell jokes].",
    "There once was {A.intro}. {A.He} lived {home} and [liked|loved] [the sun|the rain|long walks|old stories].",
    "Long ago, {home}, there lived {A.intro}.",
    "A long time ago, there was {A.intro}. {A.He} was {A.trait} and [never told a lie|always said thank "
    "you|loved to laugh].",
    "In a small village, there lived {A.intro}. {A.He} was {A.trait}.",
    "In a [small|quiet|faraway] village [by the sea|near a forest|under a mountain], there was {A.intro}.",
    "In a [big|deep|green] forest, there lived {A.intro}. {A.He} was very {A.trait}.",
    "Far away, behind [seven|three] hills, lived {A.intro}.",
    "{A.intro} lived {home}. {A.He} was {A.trait} and [happy|always busy].",
    "{A.Full} was {A.a_trait} {A.kind}. {A.He} lived {home}.",
    "{A.Full} lived {home}. [Every day|Each morning], {A.he} [went outside to play|walked {p.to}|fed the birds].",
    "{A.Full} and {A.his} {M.role} lived {home}.",
    "This is a story about {A.intro}. {A.He} lived {home}.",
    "Do you know {A}? {A.He} was {A.a_trait} {A.kind} who lived {home}.",
    "Not far from here, there was {A.intro} who was very {A.trait}.",
    "Every morning, {A.full} [looked out of the window|sang a little song|said hello to the sun]. {A.He} lived {home}.",
    "Once upon a time, there was {A.intro}. {A.He} had a good friend, {B.intro}.",
    "Deep in the forest, there lived {A.intro}. {A.He} was very {A.trait}.",
    "High on a hill, there was a small house. {A.intro} lived there with {A.his} {M.role}.",
    "Two friends lived [in a small village|by the sea|near a forest]. Their names were {A.proper} and {B.proper}.",
    "There were once two friends, {A.full} and {B.full}. They [did everything together|lived by a lake].",
    "{A.Full} was [a very|the most] {A.trait} {A.kind} [in the village|in the world].",
    "{A.Full} loved [songs|games|stories|the rain|the stars|picnics] more than anything.",
    "{A.Full} was {A.a_trait} {A.kind} who [loved|liked] to [play outside|sing|explore|laugh|help others|tell jokes].",
    "The {A.kind} lived {home}. {A.His} name was {A.proper}.",
    "A little {A.kind} named {A.proper} lived {home}.",
    "{A.Full} and {B.full} were [best|good] friends. They lived [in the same village|near the same forest|by a lake].",
)
# Openings that are already a moment; the plot goes on without a new time.
OPENINGS_SUDDEN: Beat = (
    "{time}, {A.full} [woke up early|got up with the sun|woke up and smiled]. It was [a beautiful day|a good "
    "day to play].",
    "{time}, {A.full} went {p.to} with {A.his} {M.role}.",
    "{time}, {A.full} was [walking|playing|sitting] {p.at}.",
    "{time}, {A.intro} [was walking|was playing|went for a walk] {p.at}.",
    "{time}, {A.full} and {B.full} went {p.to} together.",
    "It was a [sunny|cold|windy|warm|gray] day. {A.Full} was {p.at}.",
    "It was a [sunny|cold|windy|warm|gray] [morning|afternoon], and {A.full} wanted to go outside.",
    "It was [summer|spring|autumn|winter]. {A.Full} was {p.at} with {A.his} {M.role}.",
    "The sun was [shining|high in the sky|warm and bright]. {A.Full} went {p.to}.",
    "The [wind|rain|snow] had stopped at last. {A.Full} ran {p.to}.",
    '"[Good morning|Hello|Wake up], {A.call}!" said {A.his} {M.role}. {A.The} [smiled|jumped out of bed|laughed].',
    '"Come with me {p.to}," said {A.his} {M.role}. {A.The} was [very happy|so excited].',
    "{A.Full} was {p.at}. {A.He} felt [happy|a little bored|full of joy].",
    "{A.Full} went {p.to} with {A.his} {M.role}.",
    "Last [summer|winter|spring|week], {A.full} went {p.to} with {A.his} {M.role}.",
    "The {A.kind} was {p.at}. {A.His} name was {A.proper}, and {A.he} was very {A.trait}.",
    "The little {A.kind} was called {A.proper}. {A.He} was {p.at} with {A.his} {M.role}.",
    "Yesterday, {A.full} went {p.to} with {A.his} {M.role}.",
    "When the sun came up, {A.full} [got out of bed|was already awake]. It was [a beautiful day|a good day to play].",
    "On a [cold winter|warm summer|windy autumn|bright spring] day, {A.full} [was walking|was playing|sat] {p.at}.",
    "Under a big tree, {A.intro} was [sleeping|resting|reading a book].",
    '"Look!" [cried|called] {A.the}. "The sun is shining!" {A.He} ran {p.to}.',
    '"Hello, [sun|birds|trees|world]!" said {A.the}. {A.He} was in a good mood and went {p.to}.',
    "The {A.kind} was [hungry|tired|happy|bored]. {A.His} name was {A.proper}.",
    "In the morning, {A.full} went {p.to}. {A.He} [sang a song|smiled at everyone|felt happy].",
    "Today was a special day for {A.the}. {A.He} was {p.at} with {A.his} {M.role}.",
    "My friend {A.proper} told me this story. {time}, {A.he} was {p.at}.",
    "{A.Full} looked out of the window. The [sky was blue|birds were singing|sun was up], so {A.he} went {p.to}.",
)
FILLERS: Beat = (
    "", "", "",
    "{A.He} liked to eat {f}.",
    "{A.He} had [a big smile|bright eyes|a warm heart|many dreams].",
    "{A.He} loved [songs|games|stories|the rain|the stars|picnics] more than anything.",
    "Everyone [liked|loved] {A.him}.",
    "{A.His} best friend was {B.intro}.",
)  # fmt: skip

# -------------------------------------------------------------------------------------------------------------- plots

THANKS = "[thank you so much|thank you|oh, thank you]"
SEARCH_NO = "[it was not there|there was nothing|{A.he} found only [leaves|an old shoe|a snail|a stick]]"

LOST_TOY: tuple[Beat, ...] = (
    (
        "{A} had {o.a}. {A.He} {o.play}.",
        "{A} had {o.a} from {A.his} {M.role}. {A.He} loved it very much.",
        "{A.His} favorite thing was {o.a}. {A.He} {o.play}.",
    ),
    (
        '{when} {A} could not find {o.the}. "Where is my {o.noun}?" {A.he} [cried|asked].',
        "{when} {o.the} was gone. {A} [was very sad|felt like crying|did not know what to do].",
        '{when} {A} looked for {o.the}, but it was not in its place. "Oh no! My {o.noun} is gone!" {A.he} cried.',
        "{when} {A} put {o.the} down for a moment. When {A.he} came back, it was gone.",
    ),
    PARAGRAPH,
    (
        "{A} looked {p.spot1}, but " + SEARCH_NO + ". {A.He} looked {p.spot2}, but it was not there [either|too].",
        "First {A.he} looked {p.spot1}. Then {A.he} looked {p.spot2}. [No {o.noun}!|The {o.noun} was not there.]",
        "{A} went {p.to} and looked {p.spot1}, but " + SEARCH_NO + ".",
    ),
    (
        'Then {A} met {B.full}. "[Why are you sad|What is wrong|What are you looking for]?" asked {B}. '
        '"I lost my {o.noun}," said {A}.',
        '{B.Full} came by. "Can I help you?" {B.he} asked. "Yes, please. I cannot find my {o.noun}," said {A}.',
        '{B.Full} saw that {A} was sad. "Do not cry," {B.he} said. "We will look for it together."',
    ),
    (
        "They looked [high and low|everywhere]. At last, {B} looked {p.spot3} and [shouted|called], "
        '"[Here it is|I found it|Look, there it is]!"',
        "Together they went {p.to}. {B} pointed {p.spot3}. There was {o.the}!",
        '{B} [thought for a while|had an idea]. "Did you look {p.spot3}?" {B.he} asked. They went there, and '
        "there it was!",
        "They walked and walked. Suddenly, {A} saw something {p.spot3}. It was {o.the}!",
    ),
    PARAGRAPH,
    (
        '"' + THANKS + ', {B.call}!" said {A}. {A.He} hugged {B} and [smiled|laughed|danced with joy].',
        '{A} was so happy that {A.he} [jumped up and down|hugged {B}|laughed out loud]. "' + THANKS + '!" {A.he} said.',
        '{A} held {o.the} tight. "You are a true friend," {A.he} said to {B}.',
    ),
    (
        "From that day on, {A} always [put {o.the} back in its place|took good care of {o.the}].",
        "They played with {o.the} until [the sun went down|it was time for dinner].",
        "{A} let {B} play with {o.the} too, and they had a lot of fun.",
        "",
    ),
)

WANT_TOY: tuple[Beat, ...] = (
    (
        "{when} {A} saw {o.a} in the window of a shop. {A.He} [wanted it very much|could not stop looking at it].",
        '{when} {A} saw {o.a} at the market. "I wish I had [one like that|that {o.noun}]," {A.he} said.',
        '{when} {A} asked {A.his} {M.role}, "Can I have {o.a}?"',
    ),
    (
        "But {A} had [no money|only one coin|only two coins].",
        "But {o.the} cost ten coins, and {A} had only [one|two|three].",
        '"You must [save your coins|work for it]," said {A.his} {M.role}.',
    ),
    PARAGRAPH,
    (
        "So {A} [helped|went to help] {A.his} {M.role}. {A.He} [swept the floor|washed the dishes|carried water] and "
        "[fed the hens|picked apples|cleaned the windows].",
        "So {A} worked hard. On Monday {A.he} [swept the floor|picked apples]. On Tuesday {A.he} [fed the "
        "hens|washed the "
        "dishes]. On Wednesday {A.he} [carried wood|watered the garden].",
        "{A} had an idea. {A.He} picked [berries|flowers|apples] [in the meadow|behind the house] and sold "
        "them at the market.",
    ),
    (
        "It was hard work, and {A} was tired, but {A.he} did not [give up|stop].",
        "Every day {A.he} put [one coin|a coin] in a jar.",
        "{B.Full} came to help {A.him}, and the work [went fast|was more fun].",
    ),
    (
        "At last, {A} had enough coins. {A.He} ran to the shop [as fast as {A.he} could|with a big smile].",
        "After [a week|many days|two weeks], the jar was full. {A} ran to the shop.",
    ),
    PARAGRAPH,
    (
        "But on the way, {A.he} saw {B.full}. {B} was [crying|very sad] because {B.he} had [nothing to "
        "eat|lost {B.his} lunch]. "
        "{A} gave {B} half of the coins. The man in the shop [saw it|heard about it] and said, "
        '"You have a kind heart. You can have the {o.noun} for half of the money."',
        '"I would like {o.the}, please," {A.he} said. The [man|woman] in the shop smiled and gave it to {A.him}.',
        "But {o.the} was gone! Somebody had bought it. {A} walked home with [tears in {A.his} eyes|a heavy "
        "heart]. At home, "
        '{A.his} {M.role} [smiled|was waiting]. "This is for you, because you worked so hard," {M.he} said. '
        "It was {o.the}!",
    ),
    (
        "{A} took {o.the} home and {o.play}.",
        "{A} was [proud|very proud and happy]. {A.He} had worked for it all by {A.himself}.",
        '"It is the best {o.noun} in the world," said {A}.',
    ),
)

FEAR: tuple[Beat, ...] = (
    (
        "But {A} was afraid of {k}. {k.why}.",
        "There was only one problem. {A} was afraid of {k}, because {k.why}.",
        "{A} was [afraid|very afraid] of one thing: {k}.",
    ),
    (
        '{when} {A.his} friend {B.the} [asked|said], "[Why are you hiding|Why do you look so scared|What is wrong]?"',
        "{when} {B.full} wanted to play with {A}, but {A} [stayed at home|did not want to come].",
    ),
    (
        '"I am afraid of {k}," said {A} in a [small|quiet] voice.',
        '"Please do not laugh," said {A}. "I am afraid of {k}."',
    ),
    PARAGRAPH,
    (
        '{B} did not laugh. "[Everyone is afraid sometimes|I was afraid once too]," {B.he} said. "[I will '
        "help you|Take my "
        'hand|Let us try together]."',
        '"Being brave does not mean that you are never afraid," said {B}. "It means that you try."',
        '"Come with me," said {B}. "[I will stay with you|I have an idea|You are not alone]."',
    ),
    (
        "{A}'s heart [beat fast|was beating fast]. [But {A.he} took a deep breath|But {A.he} nodded].",
        "At first, {A} wanted to [run away|go home]. Then {A.he} took a deep breath.",
        "{A} closed {A.his} eyes and counted to [three|ten].",
        "",
    ),
    ("So they {k.how}.", "Then they {k.how}.", "Slowly, they {k.how}."),
    PARAGRAPH,
    (
        "{A} [began to smile|laughed]. {A.He} saw that {k.end}.",
        '"[Look|Oh]! It is not so bad!" said {A}. Now {A.he} knew that {k.end}.',
        "And then {A} understood that {k.end}.",
    ),
    (
        '"I did it!" {A.he} [shouted|cried]. {B} clapped {B.his} hands.',
        '"You were very brave," said {B}. {A} felt [proud|warm inside|ten feet tall].',
        "{A.His} {M.role} was very proud of {A.him}.",
    ),
    ("After that, {A} was not afraid of {k} anymore.", "From then on, {A} was never afraid of {k} again.", ""),
)

SHARE: tuple[Beat, ...] = (
    (
        "{when} {A} and {B.full} found {o.a} {p.at}.",
        "{when} {A.his} {M.role} gave {A} and {B.full} {o.a}.",
        "{when} {A} and {B.full} were playing {p.at}. Then they saw {o.a}.",
    ),
    (
        "\"It is mine!\" said {A}. \"No, it is mine!\" said {B}. \"I saw it first!\"",
        "{A} wanted to have it, and {B} wanted it too. They [pulled and pulled|began to fight].",
        "\"I want it!\" shouted {A}. \"Give it to me!\" shouted {B}.",
    ),
    (
        "Both of them were [angry|very angry]. {A} went [left|home], and {B} [went right|sat down and cried].",
        "They did not talk to each other for [a whole day|a long time].",
        "{A} pushed {B}, and {B} fell down and [cried|began to cry].",
    ),
    PARAGRAPH,
    (
        "{A.His} {M.role} [saw them|heard the noise] and said, \"[A toy is not as important as a "
        "friend|You can take turns|It is "
        "more fun to share].\"",
        "{A} sat down alone. It was [no fun|boring] to play without {B}. {A.He} felt [sorry|bad|lonely].",
        "Then it began to rain, and they both had to hide under [the same tree|one big leaf|the same roof].",
    ),
    (
        "\"I am sorry,\" said {A}. \"[You can have it first|Let us share it|We can play with it together].\"",
        "{A} went to {B} and said, \"I am sorry. You are my friend. [Please play with me|Let us share].\"",
        "{A} looked at {B}, and {B} looked at {A}. \"I am sorry,\" they both said at the same time.",
    ),
    ("\"I am sorry too,\" said {B}.", "{B} [smiled|nodded and smiled]. \"I am sorry too,\" {B.he} said.",
     "{B} gave {A} a [big|long] hug."),
    PARAGRAPH,
    (
        "So they took turns with {o.the}. First {A} had it, and then {B} had it.",
        "They played with {o.the} together [all day long|until the evening].",
        "On one day {A} had {o.the}, and on the next day {B} had it.",
    ),
    (
        "They learned that sharing is [more fun than fighting|the best game of all].",
        "It was much more fun [together|that way].",
        "They never fought about {o.a_noun} again.",
    ),
)  # fmt: skip

LITTLE_ONE: tuple[Beat, ...] = (
    (
        "{when} {A} heard a [soft|small|sad] {y.cry} {p.spot1}.",
        "{when} {A} was [walking home|going {p.to}] when {A.he} heard a sad {y.cry}.",
        "{when} {A} found a little {y} {p.at}. It was [all alone|shaking|cold and hungry].",
    ),
    (
        '"[Are you lost|Where is your mother], little one?" asked {A}.',
        '"Hello, little {y}," said {A}. "[Are you lost|Where do you live|Do not be afraid]?"',
        "The little {y} [could not find its mother|had lost its way|looked cold and sad].",
    ),
    (
        '"I cannot find my mother," said the {y}.',
        'The {y} [began to cry|only looked at its feet]. "I want to go home," it said.',
        "{A} gave it [some water|some {f}|a warm scarf], and it felt better.",
    ),
    PARAGRAPH,
    (
        '{A} wanted to help. {A.He} asked {B.full}, "Do you know where the {y} lives?"',
        'On the way they met {B.full}. "Have you seen the mother of this {y}?" asked {A}.',
        '"I will take you home," said {A}. They asked {B.full} for help.',
    ),
    (
        '"[Yes|I think so]," said {B}. "I saw a mother {y.mother} near the {y.home}. [Follow me|Come with me]."',
        '{B} thought for a moment. "[Try|Go to] the {y.home}," {B.he} said.',
    ),
    (
        "They walked over the bridge and [up the hill|through the tall grass|past the mill]. At last, they "
        "saw the {y.home}.",
        "The way was long, and {A} carried the {y} [in {A.his} arms|on {A.his} back]. Then they came to the {y.home}.",
        "It was getting dark, but they did not stop. Soon they saw the {y.home}.",
    ),
    PARAGRAPH,
    (
        'The mother was [already looking for her baby|waiting there]. "My baby! You are [back|safe]!" she cried.',
        '"Mama!" cried the {y}. Its mother ran out and [hugged|kissed] it.',
    ),
    (
        '"' + THANKS + '," she said to {A}. "You are very kind."',
        "She thanked {A} and gave {A.him} {t.a} as a gift.",
        "{A} [waved|smiled] and went home with a warm [heart|feeling].",
    ),
    (
        "The little {y} came to visit {A} every [week|Sunday|spring].",
        "{A} and the little {y} became friends.",
        "That night, {A} told {A.his} {M.role} all about it.",
    ),
)

BUILD: tuple[Beat, ...] = (
    (
        "{when} {A} wanted to build a {b}.",
        '{when} {A} said to {B.full}, "Let us build a {b}!"',
        "{when} {A} had [a big|a great|an exciting] idea. {A.He} wanted to build the [best|biggest] {b} in the world.",
    ),
    (
        "{A.He} got {b.of} and [began to work|worked all morning].",
        "{A} and {B.full} [found|gathered] {b.of}, and they began to build.",
    ),
    (
        "The {b} [looked wonderful|was almost ready]. But then {b.broke}!",
        "But then something bad happened: {b.broke}.",
        'At first it [went well|looked good]. Then {b.broke}. "Oh no!" cried {A}.',
    ),
    PARAGRAPH,
    (
        '{A} was [sad|angry]. "I will never build a {b} again!" {A.he} said.',
        '{A} sat down and [sighed|cried a little]. "It is too hard," {A.he} said.',
        "{A} wanted to give up.",
    ),
    (
        '"[Do not give up|Try again]," said {B}. "[We can fix it|We can do it better this time|I will help you]."',
        'But {A.his} {M.role} said, "[Every builder makes mistakes|Try again|Think about why it broke]."',
        '{B} [looked at it|thought hard]. "I know what went wrong," {B.he} said.',
    ),
    (
        "So they tried again. This time, they {b.fix}.",
        "{A} [dried {A.his} tears|stood up] and tried once more. This time {A.he} {b.fix}.",
        "They began again, and this time they {b.fix}.",
    ),
    PARAGRAPH,
    (
        "It worked! The {b} was [strong and beautiful|better than before].",
        "And look! The {b} did not break.",
        "When the sun went down, the {b} was [ready|finished].",
    ),
    (
        '"We did it!" they shouted. [Everyone came to see it|They were very proud].',
        '{A.His} {M.role} came to look. "That is the best {b} I have ever seen," {M.he} said.',
        '{A} [smiled|was proud]. "I am glad that [I|we] did not give up," {A.he} said.',
    ),
)

COOK: tuple[Beat, ...] = (
    (
        "{when} {A} wanted to make {d.a} for {A.his} {M.role}.",
        "{when} {A} wanted to make {d.a} because it was {B.full}'s birthday.",
        '{when} {A} was hungry. "I will make {d.a}," {A.he} said.',
    ),
    (
        "{A.He} had {d.i1} and {d.i2}, but {A.he} had no {d.i3}.",
        "{A} looked in the kitchen and found some {d.i1} and some {d.i2}, but no {d.i3}.",
    ),
    PARAGRAPH,
    (
        'So {A} went to {C.full}. "Do you have some {d.i3}?" {A.he} asked.',
        '{A} knocked on the door of {C.full}. "May I have some {d.i3}, please?" {A.he} asked.',
    ),
    (
        '"[Yes, of course|Yes, I do]," said {C}. "[May I help you|Can I come too|Can I have a bite later]?"',
        '"You can have mine," said {C}, "[but I want to help|if I can have some {d} too]."',
        '"I have a lot," said {C}. "Take [as much as you need|this bag]."',
    ),
    (
        "They mixed everything in a [big|blue] bowl. {A} [spilled some on the floor|got some on {A.his} "
        "nose], and they laughed.",
        "{A} stirred, and {C} put in the {d.i3}. Soon the kitchen smelled [wonderful|very good].",
        "They washed their hands and worked together. [It was fun|It took a long time].",
    ),
    PARAGRAPH,
    (
        "When everything was ready, they [called|invited] everyone. There was enough for all.",
        "Then they sat down at the table and ate the {d} together.",
        '{A.His} {M.role} took a bite. "Mmm, I have never eaten such good {d}," {M.he} said.',
    ),
    (
        '"Food tastes best with friends," said {A}.',
        "Soon the plates were empty, and everyone was full and happy.",
        '{A} [smiled|was very proud]. "[Next time we will make two|Let us do it again tomorrow]," {A.he} said.',
    ),
)

NEW_FRIEND: tuple[Beat, ...] = (
    (
        "But {A} [had no one to play with|was lonely].",
        "But {A} did not have many friends, because {A.he} was [new in the village|too shy to talk].",
        "{A} [often|always] played alone, and sometimes {A.he} felt [sad|lonely].",
    ),
    (
        "{when} {A} saw {B.intro} {p.at}. {B} was [sitting|playing] alone too.",
        "{when} {A} went {p.to}. There {A.he} met {B.intro}.",
        "{when} {B.intro} came {p.to} with {o.a}.",
    ),
    (
        "{A} wanted to say hello, but {A.he} was [too shy|a little afraid].",
        "{A} did not know what to say. {A.He} looked at {A.his} feet.",
        "\"What if {B.he} does not like me?\" thought {A}.",
    ),
    PARAGRAPH,
    (
        "Then a ball rolled up to {A}'s feet. {A} picked it up. \"Is this yours?\" {A.he} asked.",
        "Then {A} took a deep breath. \"Hello. "
        "[Do you want to play with me|Can I sit here|What is your name]?\" {A.he} asked.",
        "Then {B} looked up and [smiled|waved]. \"Hi! [I am {B.proper}|Do you want to play]?\" {B.he} asked.",
    ),
    (
        "\"Yes! I was hoping that you would ask,\" said {B}.",
        "\"[Yes, please|I would love to],\" said {B}. \"[I am new here|I do not know anyone here].\"",
        "{B} [laughed|smiled]. \"[Let us play together|Come, I will show you something]!\" {B.he} said.",
    ),
    (
        "They played [hide and seek|tag|ball|pirates] and ate {f}.",
        "They [ran|jumped|climbed] and laughed [until they were tired|all afternoon].",
        "{B} showed {A} {t.a}, and {A} showed {B} a secret path.",
    ),
    PARAGRAPH,
    (
        "When it was time to go home, {A} asked, \"Will you come [again tomorrow|back]?\" "
        "\"[Of course|Yes, every day],\" said {B}.",
        "That evening, {A} told {A.his} {M.role}, \"I have a new friend!\"",
        "\"[I am glad that I met you|You are my best friend],\" said {A}. \"Me too,\" said {B}.",
    ),
    ("From that day on, {A} was never lonely again.", "From then on, they played together every day.",
     "And {A} was not shy anymore."),
)  # fmt: skip

RULE: tuple[Beat, ...] = (
    (
        '{when} {A.his} {M.role} said, "Do not {rule}." {A} [nodded|said yes].',
        '{A.His} {M.role} always said, "Do not {rule}."',
        '{when} {A.his} {M.role} had to go to the market. "Be good, and do not {rule}," {M.he} said.',
    ),
    (
        'But {A} was [curious|bored]. "[Just once|Only a little]," {A.he} thought.',
        "But when no one was looking, {A} forgot [the rule|what {A.his} {M.role} had said].",
        "But {A} did not listen.",
    ),
    ("{rule.did}.", "So {rule.did}."),
    PARAGRAPH,
    ("{rule.then}.", "Then it happened. {rule.then}.", "[Oh no|Oh dear]! {rule.then}."),
    (
        '{A} was [scared|very sorry]. "Help!" {A.he} [cried|called]. {B.Full} heard {A.him} and came [to '
        "help|running].",
        "{A} [began to cry|did not know what to do]. Then {B.full} came and helped {A.him}.",
    ),
    (
        '"You must tell {M.poss_role} the truth," said {B}.',
        '"[It is all right|Do not worry]," said {B}, "but [you must say sorry|next time you should listen]."',
    ),
    PARAGRAPH,
    (
        '{A} went to {A.his} {M.role} and told {M.him} [everything|the truth]. "I am sorry," {A.he} said.',
        'In the evening, {A} said to {A.his} {M.role}, "I am sorry. I did not listen to you."',
    ),
    (
        '{A.His} {M.role} [hugged {A.him}|was not angry]. "Thank you for telling [me|me the truth]," {M.he} said.',
        '"I am glad that you are safe," said {A.his} {M.role}, and {M.he} gave {A.him} a hug.',
    ),
    ("After that, {A} always listened.", "{A} learned to [listen|think first].", "{A} never did it again."),
)

CONTEST: tuple[Beat, ...] = (
    (
        "{when} there was a big {c} [in the village|near the lake]. {A} wanted to win.",
        '{when} {A} heard about a {c}. "I [want to|will] win!" {A.he} said.',
        '{when} {B.full} said to {A}, "Let us have a {c}!"',
    ),
    (
        "{A} practiced every day. {B.Full} practiced too.",
        '"You are too [small|slow] to win," said {C.full}. But {A} did not [listen|care].',
        "Many [children|friends|neighbors] came to watch.",
    ),
    PARAGRAPH,
    ('"Ready, set, go!" [they called|someone shouted]. {A} {c.did}.', "The {c} began, and {A} {c.did}."),
    (
        "[Soon|After a while], {A} was in front. But then {B.full} {c.trouble}.",
        "{A} was very close to the end when {B.full} {c.trouble}.",
    ),
    (
        "{A} could win now! But {B} needed help. {A} [stopped|turned around] and went back.",
        "What should {A} do? {A.He} looked at the finish line, and {A.he} looked at {B}. Then {A.he} went "
        "back to help.",
    ),
    PARAGRAPH,
    (
        '"[Are you all right|Are you hurt]?" asked {A}. {A.He} helped {B} up, and they went to the end together.',
        '"Take my hand," said {A}. They finished the {c} side by side.',
    ),
    (
        'They came in last, but everyone [cheered|clapped]. "[A good friend is better than a prize|You are '
        'the real winner]," '
        "said {A.his} {M.role}.",
        "{C.Full} won the {c}, but {A} got [a prize|a gold star|a big cake] for being kind.",
        '"You lost because of me," said {B}. "No," said {A}, "I won a friend."',
    ),
)

PLANT: tuple[Beat, ...] = (
    (
        '{when} {A.his} {M.role} gave {A} a tiny seed. "Take good care of it," {M.he} said.',
        "{when} {A} found a [small|strange|brown] seed {p.at}.",
        '{when} {B.full} gave {A} a little seed. "What is it?" asked {A}. "Wait and see," said {B}.',
    ),
    (
        "{A} put the seed in the [ground|soft ground|dark earth] and gave it water.",
        "{A} made a small hole in the garden, put the seed in, and covered it.",
    ),
    (
        "{A} waited. [One day|Two days|Three days] went by, but nothing happened.",
        "Every morning, {A} looked at the spot. There was [nothing|only mud].",
    ),
    PARAGRAPH,
    (
        '"[Why does it not grow|Is it broken]?" asked {A}. "[You must be patient|Good things take time]," '
        "said {A.his} {M.role}.",
        '"It will never grow," {A.he} said to {B.full}. "[Give it time|Wait a little more]," said {B}.',
    ),
    (
        "So {A} [watered it every day|sang to it every morning|kept the birds away].",
        "Then the [rain|sun] came and [stayed for a week|helped].",
        'A [hungry snail|goat|crow] came and wanted to eat it, but {A} said, "Please go away," and it did.',
    ),
    (
        'Then one morning, {A} saw a tiny green leaf. "It is growing!" {A.he} shouted.',
        "One day, there was a little green leaf. {A} [jumped for joy|could not believe it].",
    ),
    PARAGRAPH,
    ("In the summer, it was a {g}. It {g.did}.", "It grew and grew. It became a {g} that {g.did}."),
    (
        "{A} [called|invited] {A.his} friends and showed it to them. Everyone [was amazed|clapped].",
        '"You see," said {A.his} {M.role}, "you took good care of it."',
        "{A} kept some seeds for the next year and gave one to {B.full}.",
    ),
)

NIGHT: tuple[Beat, ...] = (
    (
        "{night} {A} could not sleep.",
        "{night} {A} was lying in bed. The moon was [big and round|bright].",
        "{night} {A} woke up in the middle of the night.",
    ),
    (
        '{A.He} heard a [strange|soft] sound. {n}! "What is that?" {A.he} [whispered|thought].',
        "{n}! {n}! Something was making a noise.",
        "Then there was a noise. {n}! {A} pulled the blanket over {A.his} head.",
    ),
    (
        '{A} went to {A.his} {M.role}. "[There is a monster|I heard something]!" {A.he} said.',
        '"Is it a [ghost|monster|giant]?" {A.he} thought. {A.His} heart beat fast.',
        '{A} woke up {B.the}. "Do you hear that?" {A.he} asked.',
    ),
    PARAGRAPH,
    (
        "But {A} wanted to know what it was. {A.He} took a [lamp|small light] and [walked to|opened] the door.",
        "{A} [took a deep breath|counted to three]. Then {A.he} went to look.",
    ),
    ("And what did {A.he} see? {n.is}!", "It was no monster at all. {n.is}.", "{A} began to laugh, because {n.is}."),
    (
        '"So that was all!" said {A}.',
        "{A} was [not afraid anymore|glad]. Now {A.he} knew that {n.why}.",
        '"Silly me," {A.he} said. It was nothing bad: {n.why}.',
    ),
    PARAGRAPH,
    (
        "{A} [went back to bed|got under the warm blanket]. The stars [shone|were bright]. Soon {A.he} was "
        "fast asleep.",
        "{A.His} {M.role} [sang a song|told {A.him} a story|kissed {A.him} good night], and {A} fell asleep.",
    ),
    (
        "In {A.his} dream, {A.he} [flew over the clouds|danced with the moon|sailed on a silver sea].",
        "The next morning, {A.he} told {A.his} friends about it, and everyone laughed.",
        "",
    ),
)

WISH: tuple[Beat, ...] = (
    (
        "{when} {A} was {p.at} when {z} {z.came}.",
        "{when} {A} found {t.a} {p.at}. {A.He} rubbed it, and {z} {z.came}.",
        "{when} {A} helped {z}. {A.He} did not know that {z.the} was magic.",
    ),
    (
        '"I can give you one wish," said {z.the}. "[What do you want?|Think well!]"',
        '"You are {A.trait}," said {z.the}. "I will give you one wish."',
    ),
    PARAGRAPH,
    (
        "{A} thought about it. {A.He} could wish for {o.a}. {A.He} could wish for [gold|a castle|a mountain of {f}].",
        '"I could have {o.a}," {A.he} thought. "Or [a big house|a bag of gold|a pony]."',
    ),
    (
        "But then {A.he} thought of {B.full}, who was [ill|sad|hungry|all alone].",
        "But then {A.he} saw {B.full}. {B} [had no home|was crying|looked sad and cold].",
    ),
    (
        '"I wish that {B} [will be happy again|will be well again|will never be alone]," said {A}.',
        '"Please help my friend {B}," said {A}. "That is my wish."',
    ),
    PARAGRAPH,
    (
        "{z.the} [smiled|nodded], and there was a bright light. [In a moment|At once], {B} [laughed|was smiling].",
        "{z.the} [clapped|sang a little song], and the wish came true. {B} [jumped for joy|smiled from ear to ear].",
    ),
    (
        '"You did not think of yourself," said {z.the}. "So this is for you." And there was {o.a}.',
        "{A} did not get [gold|a castle], but {A.he} had a [happy|good] friend, and that was [much better|worth more].",
        "Then {z.the} was gone, but {A} never forgot {z.the}.",
    ),
)

SICK: tuple[Beat, ...] = (
    (
        "{when} {A} heard that {B.full} was ill.",
        '{when} {B.full} did not come to play. "Where is {B}?" asked {A}. "{B.he} is ill," said {A.his} {M.role}.',
        "{when} {A} wanted to play with {B.full}, but {B} had a bad cold.",
    ),
    (
        '"[Poor {B.call}|I must help {B.him}]," said {A}. "I will bring {B.him} some {f}."',
        "{A} wanted to make {B} [happy|smile]. {A.He} put {f} and {t.a} in a basket.",
        '"I will bring {B.him} [flowers|some {f}|a good book]," said {A}.',
    ),
    PARAGRAPH,
    (
        "{A} walked [a long way|through the rain|over the hill]. On the way, {A.he} fell, and everything "
        "[rolled into the river|landed in the mud].",
        "On the road, {A} met {C.full}. {C} was [very|so] hungry, and {A} gave {C.him} [everything|all of it].",
        "{A} stopped to rest, and a goat ate everything. {A} was [sad|angry], but {A.he} walked on.",
    ),
    (
        '{A} came to {B}\'s house with wet feet. "I have nothing for you," {A.he} said, "only [a song|a hug|a story]."',
        'At last, {A} knocked on the door. "How are you?" {A.he} asked.',
    ),
    PARAGRAPH,
    (
        '{B} [smiled|sat up in bed]. "You came! That is the best [gift|medicine]," {B.he} said.',
        '"I am so happy to see you," said {B}. {B.His} eyes [were bright|shone].',
    ),
    (
        "{A} [sang a song|told a funny story|read a book to {B.him}], and {B} laughed and laughed.",
        "They [talked|played a quiet game] until it was dark.",
    ),
    (
        "[The next day|Two days later|Soon], {B} was well again, and they [ran|went] {p.to} together.",
        "The next week, {A} had a cold, and guess who came with a basket? It was {B}!",
    ),
)

BIRTHDAY: tuple[Beat, ...] = (
    (
        "{when} it was the birthday of {A.his} {M.role}. {A} wanted to give {M.him} a [nice|special] gift.",
        "{when} {A} remembered that it was {B.full}'s birthday. But {A.he} had no gift!",
    ),
    (
        "{A} looked for a gift {p.at}. {A.He} looked {p.spot1} and {p.spot2}, but {A.he} found nothing.",
        '{A} had no money. "What can I give?" {A.he} asked {C.full}.',
    ),
    PARAGRAPH,
    (
        '"[Make something|Give something that comes from your heart]," said {C.full}.',
        "Then {A} found {t.a} {p.spot3}. That gave {A.him} an idea.",
        "{A} sat down and thought. Then {A.he} had an idea.",
    ),
    (
        "{A} [painted a picture|made a card with a big sun|wrote a song|made a crown of flowers]. It took "
        "[all day|a long time].",
        "{A} worked with paper and glue and made a [card|little book|paper star].",
    ),
    PARAGRAPH,
    (
        "In the evening there was a party with {f} and [music|candles|balloons]. {A} was [nervous|a little shy]. "
        '"I made this for you," {A.he} said.',
        '{A} ran home and said, "Happy birthday! I made this for you."',
    ),
    (
        'Everyone looked. "It is the most beautiful gift of all, because you made it [yourself|with love]," said {C}.',
        '"I love it!" was the answer, and there were [happy tears|big smiles].',
    ),
    (
        "{A} [was so happy|felt warm and happy]. {A.He} learned that the best gifts [come from the "
        "heart|cost no money].",
        "Then they all danced and sang until it was late.",
    ),
)

LEARN: tuple[Beat, ...] = (
    (
        "{when} {A} wanted to learn to {s}.",
        "{A} had a dream. {A.He} wanted to {s}.",
        '{when} {A} saw {B.full}. {B} could {s} very well. "I want to do that too," said {A}.',
    ),
    (
        "{A.He} tried, but {s.fail}.",
        "The first time, {s.fail}. {A} tried again, but [it was no better|it did not work].",
    ),
    (
        "{C.Full} saw it and laughed. {A} felt [very small|sad].",
        '"I cannot do it!" said {A}. {A.He} was [angry|close to tears].',
        '"This is too hard for me," {A.he} [said|thought].',
    ),
    PARAGRAPH,
    (
        '"You cannot do it yet," said {B.full}. "[But you will|Keep trying]."',
        '{A.His} {M.role} said, "[I could not do it at first, too|Nobody can do it the first time|Try a '
        'little every day]."',
        '{B.Full} came to {A.him}. "I will show you how," {B.he} said. "[Go slowly|Start with small steps]."',
    ),
    (
        "So {A} practiced every [day|morning|evening]. [A week|A month] went by.",
        "{A} tried on Monday. {A.He} tried on Tuesday. Each day it went a little better.",
        "{A} tried again and again, [ten times|twenty times|a hundred times].",
    ),
    PARAGRAPH,
    (
        "And then, one day, {A} {s.did}!",
        "At last, it worked. {A} {s.did}!",
    ),
    (
        '"Look at me! I can do it!" {A.he} shouted. Everyone [clapped|cheered].',
        '"[Well done|I knew it], {A.call}!" said {A.his} {M.role}.',
        "{A.He} had learned that [practice makes you better|you must never give up].",
    ),
    (
        "Now {A} teaches others, and {A.he} never laughs at them.",
        "{A} was the happiest {A.kind} in the whole world.",
        "",
    ),
)

STUCK: tuple[Beat, ...] = (
    (
        '{when} {A} heard someone call, "Help! Help!" It was {B.full}.',
        "{when} {A} saw {B.full}. {B} was in trouble.",
    ),
    (
        "{B.He} was [stuck in a tree|stuck in a deep hole|stuck in the mud|stuck between two rocks] and "
        "could not get [out|free].",
    ),
    (
        '"[Hold on|Do not be afraid|Wait], I will help you!" said {A}.',
        '"How did you get there?" asked {A}. "I wanted to [see the world|find some {f}|get my {o.noun} '
        'back]," said {B}.',
    ),
    PARAGRAPH,
    (
        "{A} pulled and pulled, but {A.he} was not strong enough.",
        "{A} tried to reach {B.him}, but it was too far.",
        "{A} looked for a [rope|ladder|long stick], but there was none.",
    ),
    (
        'So {A.he} called {C.full}. "[I am not very big|I am not very strong], but I will try," said {C}.',
        '{A} ran to get {C.full}. "Come quickly!" {A.he} said.',
    ),
    (
        "{A} pulled, and {C} pulled too. One, two, three! {B} was free!",
        "They had a plan. {C} held {A}, and {A} held {B}. They pulled with all their strength, and {B} came "
        "out with a pop!",
    ),
    PARAGRAPH,
    (
        '"' + THANKS + '!" said {B}. "You saved me."',
        '{B} hugged them both. "I will never forget this," {B.he} said.',
    ),
    (
        "They all sat down and ate {f}. [It was a good day|They laughed about it].",
        '"Together we are strong," said {A}.',
        "{B} promised to be more careful.",
    ),
)

TREASURE: tuple[Beat, ...] = (
    (
        "{when} {A} found {t.a} {p.spot1}.",
        "{when} {A} saw something shiny {p.spot2}. It was {t.a}!",
    ),
    (
        '"[Whose is it|Who lost this|Where does it come from]?" {A.he} [asked|thought].',
        '"I am rich!" said {A}. But then {A.he} thought, "Somebody must have lost it."',
    ),
    PARAGRAPH,
    (
        '{A} asked {B.full}. "It is not mine," said {B}. "Ask {C.the}."',
        'First {A.he} went to {B.full}. "Is this your {t.noun}?" {A.he} asked. "No," said {B}, "but [I know '
        "who lost one|"
        '{C.the} lost one]."',
    ),
    (
        "So {A} went {q.to}. There sat {C.full} with a sad face.",
        "{A} walked {q.to} and saw {C.full}, who was [looking for something|crying].",
    ),
    (
        '"Did you lose {t.a}?" asked {A}. "Yes! It was a gift from my grandmother!" said {C}.',
        '"My {t.noun}!" cried {C}. "You found it!"',
    ),
    PARAGRAPH,
    (
        "{A} gave it back [at once|with a smile]. {C} was so happy that {C.he} [cried|sang|danced].",
        '"Here it is," said {A}. "' + THANKS + '," said {C}. "You are [honest|very honest]."',
    ),
    (
        "To say thank you, {C} gave {A} {o.a}.",
        "{A} went home without the {t.noun}, but with a [happy|light] heart.",
        "{C} invited {A} to eat {f}, and they became good friends.",
    ),
)

RAIN: tuple[Beat, ...] = (
    (
        '{when} it began to rain. {A} [could not play outside|had to stay inside]. "I am so bored," {A.he} said.',
        "{when} it rained and rained. {A} looked out of the window and [sighed|felt sad].",
    ),
    (
        '{A.His} {M.role} gave {A.him} {an_empty}. "What is this for?" asked {A}. "You will see," said {M.he_role}.',
        '{A} found {an_empty} in the [kitchen|attic]. "What can I do with this?" {A.he} thought.',
    ),
    PARAGRAPH,
    (
        '"This is not a box," {A.he} said. "It is a [ship|rocket|castle|train]!"',
        "{A} [closed {A.his} eyes|climbed in]. Now it was a [pirate ship|rocket|fast train|race car].",
    ),
    (
        "{A} [sailed|flew|went] far away and met [a friendly whale|a king with a long beard|three green giants].",
        '{B.Full} came to visit and wanted to play too. "Come in!" said {A}. "We are going to [the moon|the '
        'sea|the jungle]."',
    ),
    (
        "They saw [tall mountains|pink clouds|a sleeping dragon], and they were not afraid.",
        "There was a [storm|big wave|hungry shark], but {A} was brave and [held on tight|steered well].",
    ),
    PARAGRAPH,
    (
        '"Dinner is ready!" called {A.his} {M.role}. {A} looked up. The rain had stopped.',
        "Then the sun came out, and there was a rainbow. But {A} did not [see it|want to stop].",
    ),
    (
        '"I hope that it rains [again soon|tomorrow too]," said {A}.',
        '"Where have you been?" asked {A.his} {M.role}. "Very, very far away," said {A} [with a smile|and laughed].',
    ),
)

PICNIC: tuple[Beat, ...] = (
    (
        "{when} {A} and {B.full} went {p.to} for a picnic. They had a basket with {f} and [juice|water|milk].",
        "{when} {A} packed a basket with {f} and invited {B.full} to a picnic.",
    ),
    (
        "But [ants|birds|a big goose] came and ate [everything|all of it]!",
        "But when they opened the basket, it was empty. {C.Full} had eaten everything!",
        "But then the wind blew [the plates|the blanket] away.",
    ),
    (
        '{A} looked at {B}, and they both began to laugh. "[Next time we will bring more|Let us eat at '
        'home]," said {A}.',
        "{A} was [angry|sad] for a moment. Then {B} laughed, and {A} had to laugh too.",
    ),
)

RAINBOW: tuple[Beat, ...] = (
    (
        "{when} it rained, and then the sun came out. {A} saw a big rainbow.",
        "{when} {A} saw a rainbow over the hills.",
        "{when} there was a rainbow in the sky. {A} could not stop looking at it.",
        "{when} the rain stopped, and {A} saw a [big|bright|beautiful] rainbow.",
        "{when} {A} looked up and saw a [bright|big] rainbow.",
        '{when} {B.full} called {A}. "Come and look! There is a rainbow!"',
    ),
    (
        '"I want to touch it," {A.he} said. {A.He} walked and walked, but the rainbow was always far away.',
        "{A} ran after it [until {A.he} was tired|over the hill], but {A.he} could not catch it.",
    ),
    (
        '"You cannot catch a rainbow," said {A.his} {M.role}, "but you can [look at it|paint it|keep it in '
        'your heart]."',
        "{A} sat down in the grass and looked at it. It was [beautiful|more beautiful than anything].",
    ),
    ("So {A} [painted|drew] it and put the picture over {A.his} bed.", "{A} [smiled|was happy] and walked home."),
)

GOOD_DEED: tuple[Beat, ...] = (
    (
        "{when} {A} saw {B.full}, who was carrying a heavy [bag|basket|box].",
        "{when} {B.full} dropped a basket, and [apples|eggs|oranges] rolled everywhere.",
    ),
    ('"[Can|May] I help you?" asked {A}.', '{A} ran to help. "Let me do that," {A.he} said.'),
    (
        '"' + THANKS + '," said {B}. "[You are very kind|What a {A.trait} {A.kind} you are]."',
        '{B} smiled and gave {A} some {f}. "' + THANKS + '," {B.he} said.',
    ),
    (
        "{A} felt [warm inside|happy all day]. Helping others is [easy|a good thing].",
        "The next day, {A} had a heavy bag, and {B} helped {A.him}.",
    ),
)

HIDE_AND_SEEK: tuple[Beat, ...] = (
    (
        "{when} {A} played hide and seek with {B.full} and {C.full}.",
        "{when} {A}, {B.full} and {C.full} played hide and seek {p.at}.",
    ),
    ('{A} counted to [ten|twenty]. "Ready or not, here I come!" {A.he} called.',),
    ("{A} found {C} {p.spot1}. But where was {B}? {B} was not {p.spot2} and not {p.spot3}.",),
    (
        "Then they heard a [soft|funny] sound. {B} was sleeping [behind the door|in the grass|under a blanket]!",
        '"We give up!" called {A}. {B} came out and laughed. "I was [behind you|up in the tree] all the time!"',
    ),
    ("They all laughed.", '"Now it is my turn to hide," said {A}.', ""),
)

GOOD_NIGHT: tuple[Beat, ...] = (
    ('{evening} {A} did not want to go to bed. "I am not tired," {A.he} said.',),
    (
        '"Then let us count the [stars|sheep]," said {A.his} {M.role}. "One, two, three..."',
        '"Even the [sun|birds|flowers] must sleep," said {A.his} {M.role}.',
        "{A.His} {M.role} read {A.him} a story about {z}.",
    ),
    (
        "{A} closed {A.his} eyes [for a moment|just to listen]. Soon {A.he} was asleep.",
        '"Good night, {M.call}," said {A}. "Good night, {A.call}," said {A.his} {M.role}.',
    ),
)

RULES = (
    ("go into the forest alone", "{A} went into the forest alone",
     "it grew dark, and {A} could not find the way home"),
    ("eat all the cookies", "{A} ate all the cookies in the jar", "{A.his} stomach began to hurt"),
    ("touch the blue vase", "{A} touched the blue vase", "the vase fell down and broke"),
    ("open the red door", "{A} opened the red door", "the cat ran out and was gone"),
    ("climb the old wall", "{A} climbed the old wall", "a stone came loose, and {A} fell into a bush"),
    ("play near the well", "{A} played near the well", "{A.his} shoe fell into the deep water"),
    ("feed the geese", "{A} fed the geese", "the geese wanted more and chased {A} around the yard"),
    ("pick the green apples", "{A} picked a green apple and ate it", "{A.his} stomach made a terrible noise"),
)  # fmt: skip

PLOTS: dict[str, tuple[Beat, ...]] = {
    "lost toy": LOST_TOY,
    "wanted toy": WANT_TOY,
    "fear": FEAR,
    "sharing": SHARE,
    "little one": LITTLE_ONE,
    "building": BUILD,
    "cooking": COOK,
    "new friend": NEW_FRIEND,
    "rule": RULE,
    "contest": CONTEST,
    "plant": PLANT,
    "night": NIGHT,
    "wish": WISH,
    "ill friend": SICK,
    "birthday": BIRTHDAY,
    "learning": LEARN,
    "stuck": STUCK,
    "treasure": TREASURE,
    "rain": RAIN,
    "picnic": PICNIC,
    "rainbow": RAINBOW,
    "good deed": GOOD_DEED,
    "hide and seek": HIDE_AND_SEEK,
    "good night": GOOD_NIGHT,
}
# Plots of a few sentences; they also follow a longer plot as its next day.
SHORT_PLOTS = ("picnic", "rainbow", "good deed", "hide and seek", "good night")
# Plots that begin with a lasting state ("But Tom was afraid of ..."), which no opening in mid-action may precede.
PLOTS_AFTER_CALM = frozenset({"fear", "new friend"})


CLOSINGS: Beat = (
    "", "", "", "", "",
    "The end.",
    "It was a [wonderful|good|very happy] day.",
    "And they were [all|both] very happy.",
    "And they lived happily ever after.",
    "{A} went home [with a big smile|tired but happy].",
    "That night, {A} slept very well.",
    "And that was the best day of all.",
    "{A} never forgot that day.",
)  # fmt: skip

# Short sentences that keep naming the same characters, see ``name_drill``.
DRILL_SENTENCES: Beat = (
    "{A} saw {B}.",
    "{A} [liked|loved|helped|knew|thanked] {B}.",
    "{B} [smiled at|looked at|ran to|hugged|waved to] {A}.",
    '"Hello, {B.call}!" said {A}.',
    '"[Come|Look|Wait], {A.call}!" [said|called|shouted] {B}.',
    '"Thank you," said {A}.',
    '"[Yes|No|Please]!" said {B}.',
    '"[Where are you|How are you|What is that]?" asked {A}.',
    "{A} and {B} [laughed|played|danced|went home].",
    "{B} and {A} [were happy|were friends|ran {p.to}].",
    "{A} gave {B} {o.a}.",
    "{B} gave {A} some {f}.",
    "{A} [smiled|laughed|was happy|sat down].",
    "{B} was [sad|tired|glad|hungry].",
    "Then {A} [came|sang|waited for {B}].",
    "But {B} [did not see {A}|said no|was not there].",
)

# ---------------------------------------------------------------------------------------------------------- expansion

CHARACTERS = frozenset("ABC")
NAMING_FORMS = frozenset({"name", "full", "intro", "the", "proper", "call"})

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{([A-Za-z_]+)(?:\.([A-Za-z_0-9]+))?\}")
_SPEECH_TAG = re.compile(
    r"(?:(?:he|she|they|someone) )?(?:said|asked|cried|shouted|called|whispered|thought|was the answer)\b"
)
_SENTENCE_START = re.compile(r"(^|\n|[.!?](\"?) +)(\"?)([a-z])")


def pick(rng: random.Random, options: Sequence[T]) -> T:
    """Draw one option with ``rng.random()`` alone, the one draw whose sequence is fixed across Python versions."""
    return options[int(rng.random() * len(options))]


def expand(template: str, slots: dict[str, Slot], mentioned: set[str], rng: random.Random) -> str:
    """Resolve choices and slots of a template until none is left; an unknown slot or form raises ``KeyError``.

    A character's first mention introduces it ("a small fox"), later ones name it ("the fox", or by its proper
    name once that was told); ``mentioned`` holds the characters met so far. It and ``slots`` are
    updated. The capital of a form ("He") only marks a sentence start for the reader.
    """

    def substitute(match: re.Match[str]) -> str:
        slot, form = match.group(1), (match.group(2) or "name").lower()
        if slot in CHARACTERS and form in NAMING_FORMS:
            if form in ("name", "full", "intro"):
                form = "name" if slot in mentioned else "intro" if form == "intro" else "full"
            mentioned.add(slot)
            if form == "proper":
                slots[slot]["name"] = slots[slot]["proper"]
        return slots[slot][form]

    text = template
    while "[" in text or "{" in text:
        while match := _CHOICE.search(text):
            text = text[: match.start()] + pick(rng, match.group(1).split("|")) + text[match.end() :]
        text = _SLOT.sub(substitute, text)
    return text


def capitalize_sentences(text: str) -> str:
    """Put a capital at every sentence start; a speech tag after a quoted question or shout is no sentence start."""

    def fix(match: re.Match[str]) -> str:
        before = match.group(1)
        closes_quote = match.group(2) == '"' and not before.startswith(".")
        if closes_quote and not match.group(3) and _SPEECH_TAG.match(text, match.start(4)):
            return match.group(0)
        return before + match.group(3) + match.group(4).upper()

    return _SENTENCE_START.sub(fix, text)


def article(phrase: str) -> str:
    """The phrase with its indefinite article; every vowel letter in the lists sounds as one."""
    return ("an " if phrase[0] in "aeiou" else "a ") + phrase


def _pronouns(he: str) -> Slot:
    his, him = ("his", "him") if he == "he" else ("her", "her")
    return {"he": he, "his": his, "him": him, "himself": him + "self"}


def _invented_name(rng: random.Random, he: str) -> str:
    middle = pick(rng, SYLLABLES_MIDDLE) if rng.random() < 0.5 else ""
    return pick(rng, SYLLABLES_START) + middle + pick(rng, SYLLABLES_END[he])


def _character(rng: random.Random, taken: set[str], nameless_share: float, described_share: float) -> Slot:
    """A character that shares neither name nor kind of animal with those in ``taken``, which it joins."""
    he = pick(rng, ("he", "she"))
    trait = pick(rng, TRAITS)
    is_child = rng.random() < 0.5
    names = PET_NAMES[he] if not is_child else GIRLS if he == "she" else BOYS
    animals = [animal for animal in ANIMALS if animal[0] not in taken]
    animal, looks = pick(rng, animals)
    kind = ("girl" if he == "she" else "boy") if is_child else animal
    look = pick(
        rng, ("little", "young", "small", trait) if is_child else ("little", "small", "young", *looks, *looks, trait)
    )
    name = _invented_name(rng, he) if rng.random() < 0.15 else pick(rng, [n for n in names if n not in taken])
    taken |= {name} | (set() if is_child else {kind})
    slot = {"kind": kind, "trait": trait, "a_trait": article(trait), "proper": name, **_pronouns(he)}
    if not is_child and rng.random() < nameless_share:
        described = article(f"{look} {kind}")
        call = pick(rng, (f"little {kind}", f"dear {kind}", "my friend"))
        return slot | {"name": f"the {kind}", "the": f"the {kind}", "full": described, "intro": described, "call": call}
    described = f"{article(f'{look} {kind}')} {pick(rng, ('named', 'called'))} {name}"
    long = name if is_child else pick(rng, (f"{name} the {kind}", name))
    full = described if rng.random() < described_share else long
    return slot | {"name": name, "the": long, "full": full, "intro": described, "call": name}


def _thing(rng: random.Random, noun: str, looks: Sequence[str]) -> Slot:
    words = f"{pick(rng, looks)} {noun}"
    return {
        "name": words,
        "noun": noun,
        "a": article(words),
        "a_noun": article(noun),
        "the": pick(rng, (f"the {words}", f"the {noun}", f"the {noun}")),
    }


def _place(rng: random.Random, exclude: str = "") -> Slot:
    noun, preposition, spots = pick(rng, [place for place in PLACES if place[0] != exclude])
    shift = int(rng.random() * 3)
    turned = spots[shift:] + spots[:shift]
    return {"name": noun, "at": f"{preposition} the {noun}", "to": f"to the {noun}"} | {
        f"spot{i + 1}": spot for i, spot in enumerate(turned)
    }


def draw_slots(rng: random.Random) -> dict[str, Slot]:
    """All slots of one story; each value maps a form's name to text, which may hold choices and slots itself."""
    taken: set[str] = set()
    hero = _character(rng, taken, nameless_share=0.1, described_share=0.0)
    friend, third = (_character(rng, taken, nameless_share=0.4, described_share=0.3) for _ in range(2))
    role, call, he = pick(rng, GROWN_UPS)
    toy_noun, toy_looks, play = pick(rng, TOYS)
    treasure_noun, treasure_looks = pick(rng, TREASURES)
    place = _place(rng)
    skill, fail, success = pick(rng, SKILLS)
    fear, why, how, end = pick(rng, FEARS)
    dish, measure, ingredients = pick(rng, DISHES)
    shift = int(rng.random() * len(ingredients))
    i1, i2, i3 = (ingredients[(shift + step) % len(ingredients)] for step in (0, 1, 3))
    build, material, broke, fix = pick(rng, BUILDS)
    plant, grown = pick(rng, PLANTS)
    contest, did, trouble = pick(rng, CONTESTS)
    noise, noise_is, noise_why = pick(rng, NOISES)
    magic, magic_the, came = pick(rng, MAGIC)
    young, young_home, cry, grown_young = pick(rng, YOUNG)
    rule, rule_did, rule_then = pick(rng, RULES)
    return {
        "A": hero,
        "B": friend,
        "C": third,
        "M": {"name": role, "role": role, "call": call, "poss_role": f"your {role}", "he_role": f"{{A.his}} {role}",
              **_pronouns(he)},
        "o": _thing(rng, toy_noun, toy_looks) | {"play": play},
        "t": _thing(rng, treasure_noun, treasure_looks),
        "f": {"name": pick(rng, FOODS)},
        "p": place,
        "q": _place(rng, exclude=place["name"]),
        "s": {"name": skill, "fail": fail, "did": success},
        "k": {"name": fear, "why": why, "how": how, "end": end},
        "d": {"name": dish, "a": f"{measure} {dish}", "i1": i1, "i2": i2, "i3": i3},
        "b": {"name": build, "of": material, "broke": broke, "fix": fix},
        "g": {"name": plant, "did": grown},
        "c": {"name": contest, "did": did, "trouble": trouble},
        "n": {"name": noise, "is": noise_is, "why": noise_why},
        "z": {"name": magic, "the": magic_the, "came": came},
        "y": {"name": young, "home": young_home, "cry": cry, "mother": grown_young},
        "rule": {"name": rule, "did": rule_did, "then": rule_then},
        "home": {"name": pick(rng, HOMES)},
        "time": {"name": pick(rng, TIMES)},
        "an_empty": {"name": "[a big|an old|an empty|a brown] box"},
    }  # fmt: skip


def _opening(rng: random.Random, plot: str, hero_is_named: bool) -> tuple[str, bool]:
    """An opening template that fits the plot and the hero, and whether the plot must still set the time."""
    is_calm = plot in PLOTS_AFTER_CALM or rng.random() < 0.62
    lonely = plot == "new friend"
    options = [
        template
        for template in (OPENINGS_CALM if is_calm else OPENINGS_SUDDEN)
        if (hero_is_named or "} {A.kind}" not in template) and not (lonely and "friend" in template)
    ]
    opening = pick(rng, options)
    if is_calm and not lonely and opening.count(".") < 4:
        opening += " " + pick(rng, FILLERS)
    return opening, is_calm


def _times(rng: random.Random, is_calm: bool) -> dict[str, Slot]:
    """How a plot sets its time: anew after a calm opening, by pointing back (or not at all) after one in mid-action."""
    if is_calm:
        when, night, evening = pick(rng, (*TIMES, "one day", "one day")) + ",", "one night,", "one evening,"
    else:
        when, night, evening = pick(rng, ("", "", "that day,")), "that night,", "that evening,"
    return {"when": {"name": when}, "night": {"name": night}, "evening": {"name": evening}}


def story(seed: int) -> str:
    """The story of a seed: 40 to 220 words, paragraphs (in half of the stories) separated by an empty line."""
    rng = random.Random(seed)
    slots = draw_slots(rng)
    plot = pick(rng, tuple(PLOTS))
    opening, is_calm = _opening(rng, plot, hero_is_named=slots["A"]["name"] == slots["A"]["proper"])
    slots |= _times(rng, is_calm)
    beats = [opening, *(pick(rng, beat) for beat in PLOTS[plot])]
    mentioned: set[str] = set()
    text = " ".join(expand(beat, slots, mentioned, rng) for beat in beats)
    if plot not in (*SHORT_PLOTS, "night") and rng.random() < 0.15:
        slots |= {"when": {"name": "the next day,"}, "evening": {"name": "that evening,"}}
        sequel = (PARAGRAPH, *PLOTS[pick(rng, SHORT_PLOTS)])
        text = " ".join((text, *(expand(pick(rng, beat), slots, mentioned, rng) for beat in sequel)))
    text += " " + expand(pick(rng, CLOSINGS), slots, mentioned, rng)
    has_paragraphs = rng.random() < 0.5
    paragraphs = [re.sub(r" +", " ", paragraph).strip() for paragraph in text.split("\n\n")]
    return capitalize_sentences(("\n\n" if has_paragraphs else " ").join(paragraphs))


def name_drill(seed: int) -> str:
    """Three to eight short sentences about two characters, no story: exercise in naming those who are there."""
    rng = random.Random(seed)
    slots = draw_slots(rng)
    mentioned: set[str] = set()
    count = 3 + int(rng.random() * 6)
    text = " ".join(expand(pick(rng, DRILL_SENTENCES), slots, mentioned, rng) for _ in range(count))
    return capitalize_sentences(text)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print stories of the grammar, one per seed.")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first story (default: 0)")
    parser.add_argument("--count", type=int, default=3, help="number of stories (default: 3)")
    arguments = parser.parse_args()
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        print(story(seed), end="\n\n----\n\n")


if __name__ == "__main__":
    main()
