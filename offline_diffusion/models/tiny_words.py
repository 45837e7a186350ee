"""Words from which the tiny model's byte-pair merges are learnt: plain English of picture prompts."""

from __future__ import annotations

SENTENCES = """
A red cube stands on a blue table beside a green bottle.
An old lighthouse on the rocky coast under a stormy evening sky.
Two cats sleep in a basket near the window while it rains outside.
The city skyline at night, with neon signs mirrored in wet streets.
A portrait of a woman with a straw hat, painted in oil with soft light.
Three yellow birds are flying over the frozen lake at sunrise.
A photo of a cup of coffee on a wooden desk, close up, sharp focus.
Children play football in front of the school; their dog runs after the ball.
An astronaut is riding a horse through a field of purple flowers.
The word "HELLO" is written on a large white wall in black letters.
It doesn't matter, we'll see what they're doing; I'm sure you've seen it.
"""

WORDS = """
a able about above across act action active actor add after again against age ago air airplane album alien
alive all alley almost alone along already also always am amber among amount an ancient and angel angle
angry animal animated anime another answer any apart apple apron arch architecture are area arm armor army
around arrow art artist artistic as ask asleep astronaut at atmosphere atmospheric autumn avenue away axe
baby back background bad bag baker bakery balance balcony ball balloon bamboo banana band bank bar bare bark
barn baroque base basket bat bath bathroom battle be beach bead beam bear beard beautiful became because
become bed bedroom bee been beer before behind being bell below belt bench bend beneath berry beside best
better between beyond bicycle big bike bird birthday black blanket blend blind block blond blood bloom
blossom blow blue blur blurred board boat body bold bone book boot border both bottle bottom bowl box boy
branch brass brave bread break breakfast breath brick bridge bright bring broad broccoli broken bronze brook
brown brush bubble bucket build building built bull bulb burn burning bus bush business busy but butter
butterfly button buy by cabin cabinet cable cactus cake call calm camel camera camp campfire can canal
candle candy cannon canvas canyon cap captain car card care carpet carriage carry cart cartoon carved
carving castle cat catch cathedral cave ceiling cell center central century ceramic chain chair chalk chance
change character charcoal chart cheap check cheese chef cherry chess chest chicken chief child children
chimney chocolate choose church cinema cinematic circle circus city clay clean clear cliff climb clock close
cloth clothes cloud cloudy clown coach coal coast coat cobblestone coffee coin cold collection color colored
colorful column come comic common complete complex composition computer concept concert cone construction
contain container contrast cook cookie cool copper coral core corn corner correct corridor cosmic cosmos
cost costume cottage cotton couch could count counter country couple course court cover covered cow cozy
crab crack craft crane cream creature creek crisp crooked cross crowd crown cruise crystal cube cup curious
curly current curtain curve curved cut cute cyan cycle cyberpunk dance dancer dancing dark darkness dawn day
daylight dead deck decor decorated deep deer delicate delicious dense depict depth describe desert design
desk detail detailed detailing devil dew diagram diamond did difference different digital dining dinner
dinosaur direction dirt dirty display distance distant dive do doctor does dog doing doll dolphin dome done
donkey door dot double down dragon drama dramatic draw drawer drawing dream dreamy dress drink drive driver
driving drop drum dry duck dusk dust dusty each eagle ear early earth easel east easy eat eating edge effect
egg eight either elaborate elderly electric elegant elephant else elf embroidered emerald emotion empty end
endless energy engine engraved engraving enormous enough enter entire entrance epic equal equipment ethereal
even evening event ever every evil exact example exotic expression exterior extreme eye eyes fabric face
factory fade faint fair fairy fall falling family famous fantasy far farm farmer fashion fast fat father
feast feather feel feeling feet felt fence fern festival few field fierce fiery fifty fight figure figurine
fill film final find fine finger fire fireplace firework first fish fisherman five flag flame flamingo flash
flat flight float floating floor floral flow flower flowing fluffy fly flying foam focus fog foggy fold
follow food foot football for force forest forever fork form formal forty fossil fountain four fox frame
free fresh friend friendly frog from front frost frozen fruit full funny fur furniture future futuristic
galaxy game garage garden gate gather gem gentle geometric ghost giant giraffe girl give glass glasses
glitter globe glossy glove glow glowing go goat god goes going gold golden good goose gorgeous gothic grain
grand grandmother grape graph graphic grass grassy gravel gray great green greenhouse grey grid grin ground
group grow growing guard guitar gun habit had hair half hall hallway hand handle hang hanging happy harbor
hard harp has hat have hawk hay haze hazy he head hear heart heat heavy hedge held helicopter helmet help
hen her herb here hero hidden high highly highway hill hills him his history hold holding hole holiday holy
home honey hood horizon horn horse hospital hot hotel hour house how huge human hundred hungry hunter hut
hyper ice iceberg icon idea if illuminated illustration image imagine impressionist in inch industrial ink
inner insect inside instead intense interior into intricate iron is island isometric it its ivory ivy jacket
jar jazz jeans jelly jet jewel job join joy joyful juice jump jumping jungle just keep kettle key keyboard
kid kind king kingdom kitchen kite kitten knife knight knit know knot koala lace ladder lady lake lamb lamp
land landscape lane language lantern large last late laugh laughing lava lavender lay layer lead leaf
leather leaves led left leg lemon length lens leopard less let letter library lid life lift light lighthouse
lighting lightning like lily lime line linen lion lip liquid list little live living lizard llama lobster
local log logo lone lonely long look looking loose lost lot loud love lovely low lower luminous lush luxury
machine macro made magazine magic magical magnificent majestic make making man mango mansion many map maple
marble march mark market married marsh mask mass massive master mat match material matte may me meadow meal
mean meat mechanical medieval medium meet men mermaid metal metallic meter middle midnight might mile milk
mill mind mine miniature minimal minimalist mint mirror mist misty mix model modern moment monk monkey
monster month moody moon moonlight more morning mosaic moss mossy most mother motion motorcycle mountain
mountains mouse mouth move movie moving much mud mug multicolored multiple mural muscle museum mushroom
music musician must my mysterious mystical myth name narrow natural nature near nebula neck necklace need
neon nest net never new news newspaper next nice night nine no noble noise none noon nor north nose not note
nothing now number numbers oak oasis object objects ocean octopus of off office often oil old olive on once
one onion only open opera or orange orb orchard orchestra orchid order organic ornate other our out outdoor
outfit outline outside oval over overgrown overhead overlooking owl own owner ox page pagoda paint painted
painter painting pair palace pale palette palm panda panel panorama panoramic pants paper parade paradise
parent park parked parrot part party pass past pasta pastel pasture patch path pattern peaceful peach
peacock peak pearl pebble pen pencil penguin people pepper perfect period person perspective pet petal phone
photo photograph photographer photography photorealistic piano picnic picture pie piece pier pig pigeon pile
pillow pilot pin pine pineapple pink pipe pirate pixel pizza place plain plaid plan plane planet plant
plaster plastic plate platform play player playful playing pleasant plum pocket poem point polar pole police
polished pond pony pool poor pop poppy porcelain porch port portrait pose posing position post poster pot
potato pottery pour powder power powerful present pretty prince princess print prism product professional
profile proud public pull pumpkin puppy pure purple purse push put puzzle pyramid quality quantity quarter
queen quick quiet quilt rabbit race radiant radio rail railway rain rainbow rainy ranch range rare rat raven
raw ray reach read reader reading ready real realism realistic rear rectangle red reef reflect reflected
reflecting reflection reflective relationships relax remote render rendered rendering rest restaurant retro
rhino ribbon rice rich ride rider riding right ring rise river road roaring robe robot rock rocket rocky
roll roman romantic roof room rope rose rough round row royal rug ruin ruins run running rural rush rustic
rusty sad saddle safe sail sailboat sailing sailor salad salmon salt same sand sandwich sandy sat satellite
sauce save saw say scale scarf scary scene scenery scenic school science scientist scooter scorpion scratch
screen sculpture sea seagull seal season seat second secret see seed seem seen sell send sense serene series
serious serve set seven several sewing shade shadow shadows shape shaped shark sharp she sheep sheet shelf
shell shelter shine shining shiny ship shirt shoe shoes shop shore short shot should shoulder show shower
shrine side sidewalk sign silent silhouette silk silky silver simple since sing singer singing single sink
sister sit sitting six size skateboard skeleton sketch ski skiing skill skin skirt skull sky skyline
skyscraper sleek sleep sleeping sleeve slice slide slow small smell smile smiling smoke smoky smooth snail
snake snow snowman snowy so soap soccer sock sofa soft soldier solid some someone something song soon soup
south space spaceship spatial spark sparkle sparkling speed sphere spider spine spiral spirit splash spoon
spot spotted spray spread spring square squirrel stack stadium stage stain stained stair staircase stand
standing star staring starry stars start state station statue stay steak steam steampunk steel steep stem
step stick still stone stool stop storage store storm stormy story stove straight strange straw strawberry
stream street strike string stripe striped strong structure student studio study style stylish stylized
subject submarine subtle suburb subway such sugar suit suitcase summer sun sunflower sunglasses sunlight
sunny sunrise sunset super surf surface surfer surfing surreal surround surrounded surrounding swamp swan
sweater sweet swim swimming swing swirl swirling sword symbol symmetrical symmetry system table tail take
taken taking tale talk tall tank tape taxi tea teacher team teapot technology teddy teeth telephone
telescope tell temple ten tennis tent texture textured than that the theater their them then there these
they thick thin thing things think third thirty this thorn those thousand thread three throne through throw
thunder ticket tide tie tiger tile time tin tiny tip tire to toast today toe together tomato tone too took
tool tooth top torch tortoise touch toward tower town toy track tractor traffic trail train translucent
transparent travel traveler tray treasure tree trees triangle tribal trick tropical trousers truck trumpet
trunk try tube tulip tunnel turn turquoise turtle twelve twenty twilight twin twist two type umbrella under
underwater unicorn uniform unique universe until up upon upper upside urban us use used using valley van
vase vast vector vegetable vehicle velvet very vest vibrant victorian video view viewed viking village vine
vintage violet violin vision visible vivid volcano wagon wait walk walking wall wallpaper walnut want war
warm warrior was wash watch watching water watercolor waterfall wave waves wax way we wear wearing weather
weathered wedding week well were west wet whale what wheat wheel when where which while whimsical white who
whole whose why wide wife wild wildlife will willow wind windmill window windows windy wine wing wings
winter wire wise wish witch with within without wizard wolf woman women wonder wonderful wood wooden woods
wool word words work worker workshop world worn would wrapped write writing written wrong yacht yard year
years yellow yes yet yoga you young your youth zebra zen zero zoo s t re ve m ll d laptop refrigerator
scissors microwave microphone hydrant raccoon abstract include exclude graffiti tornado emoji cocktail
garbage headphones ostrich oven toaster frisbee backpack handbag toothbrush hairdryer bathtub lettuce
cucumber watermelon beverage animals vehicles skis snowboard kayak canoe anchor compass cello saxophone
harmonica accordion kangaroo chimpanzee gorilla hamster hedgehog otter squid jellyfish starfish woodpecker
parakeet canary beetle ladybug dragonfly moth caterpillar worm mosquito daisy lotus marigold hibiscus
magnolia cedar birch pebbles boulder glacier lagoon peninsula plateau prairie tundra savanna geyser crater
meteor comet asteroid eclipse solar lunar overcast drizzle thunderstorm hurricane breeze frosty humid
sparkly shimmering gleaming glistening opaque ragged polka checkered paisley beige maroon teal burgundy
magenta khaki navy crimson scarlet indigo lilac mauve ochre platinum denim tweed cardigan blouse sandals
sneakers boots mittens bracelet earrings tiara goggles monocle plumber carpenter nurse firefighter waiter
waitress judge lawyer tailor blacksmith archer priest nun grandfather uncle aunt nephew cousin teenager
toddler audience spectator commuter tourist barbershop pharmacy supermarket warehouse airport dock
observatory monastery mosque synagogue igloo tepee treehouse silo dam aqueduct courtyard patio veranda attic
cellar basement exploding melting sinking climbing crawling diving cooking baking whispering shouting
pointing leaning kneeling stretching juggling balancing carrying pushing pulling throwing catching hiding
peeking crossing resting gentleman ladies knights rubber woolen spiky slimy prickly bumpy jagged hollow
oversized gigantic rectangular triangular circular cubic cylindrical hexagonal spherical conical diagonal
vertical horizontal parallel adjacent nearby foreground midground centered slightly partly fully mostly
nearly entirely carefully gently brightly softly vividly heavily lightly tightly loosely
"""

FRAGMENTS = """
able age al ally an ance ant ar ary ate ation ative ator con cy de dis ed en ence ent er ered ering ers ery
es est ever ful ial ian ible ic ical ied ier ies ily in ine ing ings ion ious ish ism ist istic ite ity ive
ize ized le less like ling ly man ment mid mini mis most multi ness non ology or ory ous out over per pre
pro re self semi sion some sub super sur tech tele tic tion trans ture un under uni up ward wise work
"""
